#include "kvpool/blocks/free_set_nodes.h"

namespace kvpool {

std::uint32_t BlockNodes::check_run(std::uint32_t head, std::uint32_t blocks, const char*& what) const noexcept {
  std::uint32_t end = head;
  while (end < blocks && is_free(end)) ++end;
  const std::uint32_t length = end - head;
  if (meta_[head].mark != length || meta_[end - 1].mark != length) {
    what = "an end of a run has a wrong length";
    return kBadRun;
  }
  for (std::uint32_t inner = head + 1; inner < end; ++inner) {
    if (inner + 1 < end && meta_[inner].mark != 0) {
      what = "a block inside a run has a mark";
      return kBadRun;
    }
    if (meta_[inner].tag != 0) {
      what = "a free block that is no head has a tag";
      return kBadRun;
    }
  }
  return length;
}

std::uint32_t UnitNodes::check_taken(std::uint32_t unit, std::uint32_t units) const noexcept {
  if (is_head(unit)) return 0;
  const std::uint32_t length = length_in(words_[unit]);
  if ((words_[unit] & kTaken) == 0 || length == 0 || length > units - unit) return kBadRun;
  for (std::uint32_t inner = unit + 1; inner < unit + length; ++inner) {
    if (words_[inner] != 0) return kBadRun;
  }
  return length;
}

std::uint32_t UnitNodes::check_run(std::uint32_t head, std::uint32_t units, const char*& what) const noexcept {
  if ((words_[head] & kSingle) == 0 && head + 1 == units) {
    what = "a run has no second unit";
    return kBadRun;
  }
  const std::uint32_t run = length(head);
  what = "an end of a run has a wrong length";
  if (run == 0 || run > units - head || (run == 1) != ((words_[head] & kSingle) != 0)) return kBadRun;
  if (run > 1 && words_[head + run - 1] != (kEnd | std::uint64_t{run} << kLengthShift)) return kBadRun;
  if (run > 2 && words_[head + 1] != std::uint64_t{run} << kLengthShift) return kBadRun;
  for (std::uint32_t inner = head + 2; inner + 1 < head + run; ++inner) {
    what = "a unit inside a run has a mark";
    if (words_[inner] != 0) return kBadRun;
  }
  what = "a run is not maximal";
  return head + run < units && is_head(head + run) ? kBadRun : run;
}

}  // namespace kvpool
