// Cached pages and their copies on disk: which are written, and what becomes of the copies.
#include <algorithm>
#include <new>
#include <string>

#include "kvpool/base/check.h"
#include "kvpool/base/error.h"
#include "kvpool/pool/disk_copies.h"
#include "kvpool/pool/prompt_cache.h"

namespace kvpool {

Address PromptCache::slot_address(std::uint32_t slot) const noexcept {
  return blocks_.store(Medium::kDisk).address_of(slot);
}

void PromptCache::want(Address last) noexcept {
  if (!blocks_.is_local(last) || copies_->on_disk(last)) return;
  copies_->want(last);
}

// The page that an address was given for, unless it is gone or was forgotten.
PromptNode* PromptCache::node_if_cached(Address address) const noexcept {
  if (!blocks_.is_local(address) || blocks_.is_gone(address)) return nullptr;
  if (store_of(address).state(block_of(address)) != BlockState::kHistorical) return nullptr;
  PromptNode* const node = node_of(page_of(address));
  return node->payload.forgotten ? nullptr : node;
}

// --- writing ---

// The pages of the prompt that ends with `end`, from the first without a slot on, that are to be written: at most
// `most`. visit(node, page of it, the page before it or 0).
template <class Visit>
void PromptCache::for_each_to_write(PromptNode* end, std::size_t most, const DiskChoice& choice, DiskPages& write,
                                    Visit&& visit) const {
  std::vector<PromptNode*> path;
  for (PromptNode* node = end; !node->is_root(); node = node->parent) path.push_back(node);
  Address before = 0;
  for (auto node = path.rbegin(); node != path.rend(); ++node) {
    const PromptPayload& payload = (*node)->payload;
    for (std::uint32_t i = 0; i < (*node)->pages; ++i) {
      const Address page = payload.values[i];
      if (payload.value_class == ValueClass::kRemote) return;
      ++write.looked;
      if (!copies_->on_disk(page)) {
        write.waits = copies_->being_written(page);
        if (write.waits || most-- == 0) return;
        if (!choice.everything && !admits(copies_->admission(), payload.hits)) return;
        if (medium_of(page) == Medium::kHbm && !choice.from_hbm) return;
        if (blocks_.filling(page)) return;
        visit(*node, i, before);
      }
      before = page;
    }
  }
}

DiskPages PromptCache::begin_disk_write(Address last, const DiskChoice& choice) {
  DiskPages write;
  PromptNode* const end = node_if_cached(last);
  if (end == nullptr) return write;
  std::size_t needed = 0;
  for_each_to_write(end, choice.most, choice, write, [&](PromptNode*, std::uint32_t, Address) { ++needed; });
  if (needed == 0) return write;
  make_disk_room(needed, *end);
  const std::uint32_t page_tokens = index_.page_tokens();
  write.pages.reserve(needed);
  write.tokens.reserve(needed * page_tokens);
  std::vector<Address> slots(std::min(needed, blocks_.free_blocks(Medium::kDisk)));
  for (const PromptNode* node = end;; node = node->parent) {
    if (!node->is_root()) continue;
    write.name_space = static_cast<const RadixTree<PromptPayload>::Root*>(node)->name;
    break;
  }
  // From here on only the path in for_each_to_write may throw, before it visits anything.
  const std::size_t most = slots.size();
  std::size_t chosen = 0;
  std::optional<DiskPlace> place_before;
  for_each_to_write(end, most, choice, write, [&](PromptNode* node, std::uint32_t page, Address before) {
    if (chosen == 0) {
      KVPOOL_CHECK(blocks_.take(most, Medium::kDisk, BlockState::kReserved, slots.data()));
      if (before != 0) {
        const std::uint32_t slot = medium_of(before) == Medium::kDisk ? block_of(before) : copies_->slot_of(before);
        place_before = {slot, copies_->generation(slot)};
      }
    }
    const std::uint64_t generation = copies_->next_generation();
    const Address slot = slots[chosen++];
    const Address from = node->payload.values[page];
    write.pages.push_back({from, slot, generation, place_before});
    set_being_written(from, slot);
    const Token* tokens = node->tokens.get() + std::size_t{page} * page_tokens;
    write.tokens.insert(write.tokens.end(), tokens, tokens + page_tokens);
    place_before = {block_of(slot), generation};
  });
  if (chosen > 0 && chosen < most) blocks_.release(slots.data() + chosen, most - chosen);
  return write;
}

// A page whose write failed is the end: those behind it could not be found without it (A18).
std::size_t PromptCache::finish_disk_write(const DiskPages& write, const std::vector<bool>& written,
                                           std::size_t first) noexcept {
  std::size_t kept = 0;
  bool found = copies_ != nullptr;
  for (std::size_t i = 0; i < write.pages.size(); ++i) {
    const DiskPage& page = write.pages[i];
    const bool here = written[first + i];
    const Address slot = slot_address(block_of(page.slot));
    const Address at = copies_ != nullptr ? page_written_to(slot) : 0;
    if (at != 0) copies_->set_written_to(at, DiskCopies::kNone);
    found = found && here && at != 0;
    if (copies_ != nullptr && here) copies_->set_generation(block_of(slot), page.generation);
    if (!found) {
      if (copies_ != nullptr && here) copies_->erase(block_of(slot));
      blocks_.release(&slot, 1);
      continue;
    }
    set_copy(at, slot);
    want_what_continues(at);
    ++kept;
  }
  counters_.disk_written_blocks += kept;
  return kept;
}

void PromptCache::cancel_disk_write(const DiskPages& write) noexcept {
  for (const DiskPage& page : write.pages) {
    const Address slot = slot_address(block_of(page.slot));
    const Address at = copies_ != nullptr ? page_written_to(slot) : 0;
    if (at != 0) copies_->set_written_to(at, DiskCopies::kNone);
    blocks_.release(&slot, 1);
  }
}

void PromptCache::set_being_written(Address page, Address slot) noexcept {
  copies_->set_written_to(page, block_of(slot));
  blocks_.set_mark(slot, mark_naming(page));
}

// What is written of it is not needed.
void PromptCache::page_is_gone(Address page) noexcept {
  const std::uint32_t slot = copies_->written_to(page);
  if (slot == DiskCopies::kNone) return;
  copies_->set_written_to(page, DiskCopies::kNone);
  blocks_.set_mark(slot_address(slot), 0);
}

// Where the page lies that is being written to this slot; 0: it is gone.
Address PromptCache::page_written_to(Address slot) const noexcept {
  const std::uint32_t mark = store(Medium::kDisk).mark(block_of(slot));
  return mark == 0 ? 0 : store(medium_of_mark(mark)).address_of(block_of_mark(mark));
}

// A page that could not be written because the one before it was not on disk can be written now.
void PromptCache::want_what_continues(Address page) noexcept {
  PromptNode* const node = node_of(page);
  if (node->payload.values[node->pages - 1] == page) {
    index_.for_each_child(node, [&](const PromptNode& child) {
      if (child.payload.value_class != ValueClass::kRemote && !copies_->being_written(child.payload.values[0])) {
        want_moved(child);
      }
    });
  }
}

// Its pages lie where they can be written, which they did not before.
void PromptCache::want_moved(const PromptNode& node) noexcept {
  if (admits(copies_->admission(), node.payload.hits)) want(node.payload.values[node.pages - 1]);
}
void PromptCache::set_copy(Address page, Address slot) noexcept {
  blocks_.set_state(slot, BlockState::kHistorical);
  blocks_.set_tag(slot, CacheBlocks::kCacheTag);
  blocks_.set_mark(slot, mark_naming(page));
  copies_->set(page, block_of(slot));
}

void PromptCache::drop_copy(Address page) noexcept {
  const Address slot = slot_address(copies_->take(page));
  copies_->erase(block_of(slot));
  blocks_.release(&slot, 1);
}

void PromptCache::move_copy(Address from, Address to) noexcept {
  if (const std::uint32_t slot = copies_->written_to(from); slot != DiskCopies::kNone) {
    copies_->set_written_to(from, DiskCopies::kNone);
    set_being_written(to, slot_address(slot));
  }
  if (copies_->slot_of(from) == DiskCopies::kNone) return;
  const std::uint32_t slot = copies_->take(from);
  copies_->set(to, slot);
  blocks_.set_mark(slot_address(slot), mark_naming(to));
}

// --- room ---

// As the index evicts, but pages that have a copy go on being found there.
std::size_t PromptCache::evict_keeping_copies(Medium medium, std::size_t n) noexcept {
  const ValueClass value_class = value_class_of(medium);
  std::size_t gone = 0;
  while (gone < n) {
    PromptNode* node = index_.coldest(value_class);
    if (node == nullptr) break;
    std::uint32_t copied = node->pages;
    while (copied > 0 && !copies_->on_disk(node->payload.values[copied - 1])) --copied;
    if (copied < node->pages) {
      // Nothing below these pages is on disk (A18).
      const std::size_t dropped = index_.evict(value_class, std::min<std::size_t>(n - gone, node->pages - copied));
      if (dropped == 0) break;
      gone += dropped;
      continue;
    }
    try {
      node = index_.hold_coldest(value_class, std::min(n - gone, DiskCopies::kScratch));
    } catch (const std::bad_alloc&) {
      break;
    }
    gone += leave_to_copies(node);
  }
  return gone;
}

// The pages of a held node lie on DISK from now on. Returns how many. REQUIRES: all of them have copies.
std::size_t PromptCache::leave_to_copies(PromptNode* node) noexcept {
  const std::uint32_t pages = node->pages;
  Address* const old = copies_->old();
  Address* const slots = copies_->scratch();
  std::copy_n(node->payload.values.get(), pages, old);
  for (std::uint32_t i = 0; i < pages; ++i) slots[i] = slot_address(copies_->take(old[i]));
  index_.redirect(node, slots);
  placed(*node);
  blocks_.release(old, pages);
  index_.release_hold(node);
  counters_.moved_to_disk_blocks += pages;
  return pages;
}

// --- reading ---

void PromptCache::begin_bring(std::span<const Address> given, PendingSwapIn& pending) {
  pending.source = Medium::kDisk;
  pending.held.reserve(given.size());
  try {
    gather(given, pending);
  } catch (...) {
    for (const IndexPin& pin : pending.pins) index_.unpin(pin);
    pending.pins.clear();
    throw;
  }
}

std::uint64_t PromptCache::disk_generation(Address slot) const noexcept {
  return copies_ == nullptr ? 0 : copies_->generation(block_of(slot));
}

// Another thread may have brought some of the pages first: their blocks here are not needed.
void PromptCache::finish_bring(PendingSwapIn& pending) {
  check_not_forgotten(pending.addresses);
  // From here on nothing throws: begin_bring() has made room for the pins.
  renew(pending.to);
  for (std::size_t i = 0; i < pending.from.size();) {
    const Address at = page_of(pending.from[i]);
    PromptNode* const node = node_of(at);
    const std::uint32_t pages = node->pages;
    if (medium_of(at) != Medium::kDisk) {
      blocks_.release(&pending.to[i], pages);
    } else {
      index_.redirect(node, &pending.to[i]);
      placed(*node);
      for (std::uint32_t k = 0; k < pages; ++k) {
        set_copy(pending.to[i + k], slot_address(block_of(pending.from[i + k])));
      }
      counters_.brought_blocks += pages;
    }
    i += pages;
  }
  pending.to.clear();
  for (std::size_t i = 0; i < pending.addresses.size(); ++i) {
    pending.addresses[i] = page_of(pending.addresses[i]);
  }
  pin_all(pending);
  for (const IndexPin& pin : pending.pins) index_.unpin(pin);
  pending.pins.clear();
}

std::size_t PromptCache::lose(Address slot) {
  if (node_if_cached(slot) == nullptr) return 0;
  const std::size_t lost = forget({&slot, 1});
  ++counters_.lost_disk_blocks;
  return lost;
}

// --- the beginning and the end ---

void PromptCache::recover(std::string_view name_space, std::span<const Token> tokens, std::span<const Address> slots,
                          std::span<Address> canonical) {
  const IndexInsertion inserted =
      index_.insert(name_space, tokens.data(), slots.size(), slots.data(), canonical.data());
  index_.unpin(inserted.pin);
}

void PromptCache::forget_disk() {
  if (copies_ == nullptr) return;
  std::vector<Address> on_disk;
  std::vector<Address> copied;
  index_.for_each_node([&](const PromptNode& node) {
    if (node.payload.value_class == ValueClass::kRemote) return;
    for (std::uint32_t i = 0; i < node.pages; ++i) {
      const Address page = node.payload.values[i];
      if (!copies_->on_disk(page)) continue;
      (medium_of(page) == Medium::kDisk ? on_disk : copied).push_back(page);
    }
  });
  forget(on_disk);
  for (const Address page : copied) {
    if (!blocks_.is_gone(page) && copies_->slot_of(page) != DiskCopies::kNone) drop_copy(page);
  }
  // What was forgotten while it was pinned keeps its blocks, and needs no copies.
  index_.for_each_forgotten([&](const PromptNode& node) { drop_copies(node); });
  copies_ = nullptr;
}

void PromptCache::drop_copies(const PromptNode& node) noexcept {
  if (node.payload.value_class == ValueClass::kRemote) return;
  for (std::uint32_t i = 0; i < node.pages; ++i) {
    const Address page = node.payload.values[i];
    if (medium_of(page) == Medium::kDisk) {
      copies_->erase(block_of(page));  // its slot is free when its last pin goes
      continue;
    }
    if (copies_->slot_of(page) != DiskCopies::kNone) drop_copy(page);
    page_is_gone(page);
  }
}

std::vector<Address> PromptCache::ends_without_copies() const {
  std::vector<Address> ends;
  index_.for_each_node([&](const PromptNode& node) {
    if (node.payload.value_class == ValueClass::kRemote) return;
    const Address last = node.payload.values[node.pages - 1];
    if (!copies_->on_disk(last)) ends.push_back(last);
  });
  return ends;
}

void PromptCache::audit_copies() const {
  const auto fail = [](const std::string& what) { throw Error(ErrorCode::kAudit, "cache: " + what); };
  std::uint32_t copies = 0;
  const auto count = [&](const PromptNode& node) {
    if (node.payload.value_class == ValueClass::kRemote || node.payload.value_class == ValueClass::kDisk) return;
    for (std::uint32_t i = 0; i < node.pages; ++i) {
      const Address page = node.payload.values[i];
      const BlockStore& disk = store(Medium::kDisk);
      const std::uint32_t next = copies_->written_to(page);
      if (next != DiskCopies::kNone &&
          (disk.state(next) != BlockState::kReserved || disk.mark(next) != mark_naming(page))) {
        fail("a slot that is being written does not know its page (A20)");
      }
      const std::uint32_t slot = copies_->slot_of(page);
      if (slot == DiskCopies::kNone) continue;
      ++copies;
      if (disk.state(slot) != BlockState::kHistorical || disk.tag(slot) != CacheBlocks::kCacheTag ||
          disk.mark(slot) != mark_naming(page)) {
        fail("a copy on disk does not know its page (A19)");
      }
    }
  };
  index_.for_each_node(count);
  index_.for_each_forgotten(count);
  if (copies != copies_->count()) fail("a wrong count of copies on disk (A19)");
  index_.for_each_node([&](const PromptNode& node) {
    if (node.payload.value_class == ValueClass::kRemote) return;
    const PromptNode* const above = node.parent;
    bool before = above->is_root() || (above->payload.value_class != ValueClass::kRemote &&
                                       copies_->on_disk(above->payload.values[above->pages - 1]));
    for (std::uint32_t i = 0; i < node.pages; ++i) {
      const bool here = copies_->on_disk(node.payload.values[i]);
      if (here && !before) fail("a page is on disk, and the one before it is not (A18)");
      before = here;
    }
  });
}

}  // namespace kvpool
