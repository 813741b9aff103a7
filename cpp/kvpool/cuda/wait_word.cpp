#include "kvpool/cuda/wait_word.h"

#include <sys/mman.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvpool/base/error.h"
#include "kvpool/cuda/stream.h"
#include "kvpool/cuda/word_alarm.h"

namespace kvpool {
namespace {

constexpr const char* kWhat = "a stream cannot wait for what a peer sends";
constexpr std::size_t kPageBytes = 4096;
constexpr std::uint32_t kPageWords = kPageBytes / sizeof(std::uint32_t);
constexpr CuResult kAlreadyRegistered = 712;
constexpr std::int64_t kRetryAfterUs = 10'000;

using Word = std::atomic<std::uint32_t>;
static_assert(sizeof(Word) == sizeof(std::uint32_t) && Word::is_always_lock_free);

CuPointer pointer(const Word* word) noexcept { return static_cast<CuPointer>(reinterpret_cast<std::uintptr_t>(word)); }

// Streams of one GPU share its queues when there are more of them than CUDA_DEVICE_MAX_CONNECTIONS says (8 if it says
// nothing). With one queue every copy stands behind the stream that waits for it.
void check_queues() {
  const char* const connections = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  if (connections == nullptr || std::string_view(connections) != "1") return;
  throw Error(
      ErrorCode::kUnsupported,
      std::string(kWhat) +
          ": CUDA_DEVICE_MAX_CONNECTIONS is 1, and so what it waits for would stand behind it in the one queue of "
          "the GPU; set the variable to 8 or more, or wait for the handle on the CPU (wait())",
      {{"connections", 1}});
}

void check_supported(const CudaContext& context) {
  check_queues();
  if (context.driver().stream_wait_value == nullptr) {
    throw Error(ErrorCode::kUnsupported, std::string(kWhat) + ": the CUDA driver has no cuStreamWaitValue32");
  }
  if (context.attribute(kCuDeviceHostPointerOfRegistered, kWhat) == 0) {
    throw Error(ErrorCode::kUnsupported,
                std::string(kWhat) + ": GPU " + std::to_string(context.ordinal()) +
                    " does not find page-locked memory where the CPU does",
                {{"device", context.ordinal()}});
  }
}

// A page that is never given back: see Q3. A forked child does not have it.
Word* map_page() {
  void* mapped = mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (mapped == MAP_FAILED) throw Error(ErrorCode::kOutOfMemory, std::string(kWhat) + ": no memory for a page");
  madvise(mapped, kPageBytes, MADV_DONTFORK);
  auto* words = static_cast<Word*>(mapped);
  for (std::uint32_t i = 0; i < kPageWords; ++i) new (words + i) Word(0);
  return words;
}

// Nothing happens to one that is page-locked. A context that was destroyed and made again has forgotten the page.
// REQUIRES: the context is current.
void lock_page(const CudaContext& context, Word* page) {
  const CudaDriver& driver = context.driver();
  int type = 0;
  if (driver.pointer_get_attribute(&type, kCuPointerMemoryType, pointer(page)) == kCudaSuccess) return;
  const CuResult result = driver.mem_host_register(page, kPageBytes, kCuHostRegisterPortable);
  if (result != kAlreadyRegistered) driver.require(result, "cuMemHostRegister", kWhat);
}

std::atomic<std::uint32_t> all_unset{0};

}  // namespace

// The words of one context. Never destroyed.
class WaitWords {
 public:
  explicit WaitWords(const CudaContext& context)
      : flags_(kCuStreamWaitGeq |
               (context.attribute(kCuDeviceFlushRemoteWrites, kWhat) != 0 ? kCuStreamWaitFlush : 0U)) {}

  // The words of this context. The first call with `make` creates them; without `make` it returns null until then.
  static WaitWords* of(const CudaContext& context, bool make) {
    // Never destroyed: threads may outlive static objects.
    static auto* const mutex = new std::mutex;
    static auto* const all = new std::map<std::pair<const CudaDriver*, CuContext>, std::unique_ptr<WaitWords>>;
    const std::pair key{&context.driver(), context.handle()};
    {
      const std::lock_guard lock(*mutex);
      if (const auto found = all->find(key); found != all->end()) return found->second.get();
    }
    if (!make) return nullptr;
    auto made = std::make_unique<WaitWords>(context);  // asks the driver, so without the lock
    const std::lock_guard lock(*mutex);
    return all->try_emplace(key, std::move(made)).first->second.get();
  }

  // Throws kRouteFailed.
  void begin_standstill() {
    const std::lock_guard lock(mutex_);
    if (unset_.load() > 0) {
      throw Error(ErrorCode::kRouteFailed,
                  "no NCCL communicator can be made while a stream of the GPU waits for what a peer is to send "
                  "(wait_on): its making waits for all work of the GPU. Send something by nccl before the first "
                  "wait_on, offer another route beside it, or wait for the handle on the CPU");
    }
    ++standstills_;
  }
  void end_standstill() noexcept {
    const std::lock_guard lock(mutex_);
    --standstills_;
  }

  std::shared_ptr<WaitWord> take(std::shared_ptr<const CudaContext> context) {
    const CurrentContext current(*context, kWhat);
    const std::shared_ptr<WaitWord> word(new WaitWord(std::move(context), *this));
    while (!give(*word)) add_page(*word->context_);
    lock_page(*word->context_, page_of(word->slot_));  // throws: the word goes back
    return word;
  }

  void take_back(WaitWord& word) noexcept {
    const std::lock_guard lock(mutex_);
    users_[word.slot_] = nullptr;
    free_[(first_free_ + free_count_++) % free_.size()] = word.slot_;
  }

  void force() noexcept {
    const std::lock_guard lock(mutex_);  // no user goes meanwhile
    for (WaitWord* user : users_) {
      if (user != nullptr) user->force();
    }
  }

  unsigned flags() const noexcept { return flags_; }
  std::atomic<std::uint32_t>& unset() noexcept { return unset_; }

 private:
  // Gives out the word that has been free for the longest time; false if all are in use. Throws kBusy.
  bool give(WaitWord& word) {
    const std::lock_guard lock(mutex_);
    if (standstills_ > 0) {
      throw Error(
          ErrorCode::kBusy,
          std::string(kWhat) +
              " while an NCCL communicator is made on its GPU, for that waits for all work there; try again then",
          {{"retry_after_us", kRetryAfterUs}});
    }
    if (free_count_ == 0) return false;
    word.slot_ = free_[first_free_];
    first_free_ = (first_free_ + 1) % free_.size();
    --free_count_;
    word.value_ = ++values_[word.slot_];
    word.word_ = pages_[word.slot_ / kPageWords] + word.slot_ % kPageWords;
    users_[word.slot_] = &word;
    unset_.fetch_add(1);
    all_unset.fetch_add(1);
    return true;
  }

  // Not under the lock: registering may wait for the GPU, and a thread that releases a word must not wait.
  void add_page(const CudaContext& context) {
    Word* page = map_page();
    try {
      lock_page(context, page);
      const std::lock_guard lock(mutex_);
      const std::size_t slots = users_.size() + kPageWords;
      pages_.reserve(pages_.size() + 1);
      values_.reserve(slots);
      users_.reserve(slots);
      std::vector<std::uint32_t> free(slots);
      for (std::uint32_t i = 0; i < free_count_; ++i) free[i] = free_[(first_free_ + i) % free_.size()];
      for (std::uint32_t i = 0; i < kPageWords; ++i)
        free[free_count_ + i] = static_cast<std::uint32_t>(users_.size()) + i;
      free_.swap(free);
      first_free_ = 0;
      free_count_ += kPageWords;
      pages_.push_back(page);
      values_.resize(slots);
      users_.resize(slots);
    } catch (...) {
      context.driver().mem_host_unregister(page);  // nobody has waited for a word of it
      munmap(page, kPageBytes);
      throw;
    }
  }

  Word* page_of(std::uint32_t slot) {
    const std::lock_guard lock(mutex_);
    return pages_[slot / kPageWords];
  }

  const unsigned flags_;
  int standstills_ = 0;  // under mutex_
  std::atomic<std::uint32_t> unset_{0};
  std::mutex mutex_;
  std::vector<Word*> pages_;
  // By slot.
  std::vector<std::uint32_t> values_;  // of the last user
  std::vector<WaitWord*> users_;       // null: free
  // The free ones, as a ring.
  std::vector<std::uint32_t> free_;
  std::size_t first_free_ = 0;
  std::uint32_t free_count_ = 0;
};

WaitWord::WaitWord(std::shared_ptr<const CudaContext> context, WaitWords& words) noexcept
    : context_(std::move(context)), words_(words) {}

std::shared_ptr<WaitWord> WaitWord::take(std::shared_ptr<const CudaContext> context, std::int64_t until_ns) {
  check_supported(*context);
  WaitWords* const words = WaitWords::of(*context, /*make=*/true);
  auto word = words->take(std::move(context));
  word->until_ns_ = until_ns;
  WordAlarm::add(until_ns, *word);
  return word;
}

WaitWord::~WaitWord() {
  if (word_ == nullptr || !context_->usable()) return;
  WordAlarm::remove(until_ns_, *this);
  set();
  words_.take_back(*this);
}

void WaitWord::hold_up(CuStream stream) const {
  const CurrentContext current(*context_, kWhat);
  check_stream_of(*context_, stream, kWhat);
  const CudaDriver& driver = context_->driver();
  driver.require(driver.stream_wait_value(stream, pointer(word_), value_, words_.flags()), "cuStreamWaitValue32",
                 kWhat);
}

void WaitWord::set() noexcept {
  if (!context_->usable() || set_.exchange(true)) return;
  word_->store(value_, std::memory_order_release);
  words_.unset().fetch_sub(1);
  all_unset.fetch_sub(1);
}

void WaitWord::force() noexcept {
  if (set_.load()) return;
  forced_.store(true, std::memory_order_release);
  set();
}

Standstill::Standstill(const CudaContext& context) : words_(*WaitWords::of(context, /*make=*/true)) {
  words_.begin_standstill();
}

Standstill::~Standstill() { words_.end_standstill(); }

bool words_unset(const CudaContext& context) noexcept {
  if (all_unset.load() == 0) return false;
  WaitWords* const words = WaitWords::of(context, /*make=*/false);
  return words != nullptr && words->unset().load() > 0;
}

void force_words(const CudaContext& context) noexcept {
  if (WaitWords* const words = WaitWords::of(context, /*make=*/false); words != nullptr) words->force();
}

}  // namespace kvpool
