// Shared by the parts of the fake driver. Everything is under one lock, which no stream's work holds.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace kvpool::fake_cuda {

using Address = unsigned long long;

enum Code : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kPeerAccessUnsupported = 217,
  kInvalidHandle = 400,
  kNotReady = 600,
  kIllegalAddress = 700,
  kLaunchTimeout = 702,
  kPeerAccessAlreadyEnabled = 704,
  kContextDestroyed = 709,
  kAlreadyRegistered = 712,
  kNotRegistered = 713,
  kNotPermitted = 800,
  kNotSupported = 801,
  kCaptureUnsupported = 900,
  kCaptureImplicit = 906,
  kCapturedEvent = 907,
};

inline constexpr int kDevicesMax = 8;
inline constexpr std::size_t kGranularity = std::size_t{2} << 20;
// Pieces of work that a stream takes before its caller has to wait, as a real driver has it (about so many).
inline constexpr std::size_t kPendingMax = 1024;

// Physical memory: freed when neither a handle nor a mapping refers to it.
struct Physical {
  Physical(int device, std::size_t bytes);
  // Another process's, or this one's once more: a memory file with its device in its name. Null for anything else.
  static std::shared_ptr<Physical> import(int descriptor);
  std::uint64_t inode() const;  // the same in all processes that have it
  ~Physical();
  Physical(const Physical&) = delete;
  Physical& operator=(const Physical&) = delete;

  int device = 0;
  std::size_t bytes = 0;
  int fd = -1;
  std::byte* host = nullptr;
  bool imported = false;  // its device counts it where it was made

 private:
  Physical() = default;
};

// Device addresses [base, base + bytes): reserved, and perhaps mapped.
struct Range {
  std::size_t bytes = 0;
  bool plain = false;  // of cuMemAlloc
  int opened = 0;      // by cuIpcOpenMemHandle, so often
  std::shared_ptr<Physical> physical;
  std::set<int> access;  // devices that may; of plain memory also those whose context has enabled peer access
};

struct Event;
struct Stream;

struct Context {
  int device = 0;
  int retained = 0;
  int lost = 0;                     // the result of every call
  std::map<int, Stream*> defaults;  // 1: the legacy one (handles 0 and 1); above: of each thread that named 2
  std::set<int> peers;              // whose plain memory it reaches (cuCtxEnablePeerAccess)
};

// An event waits for this: the end of the work in a stream when it was recorded.
struct Mark {
  std::mutex mutex;
  std::condition_variable done_changed;
  bool done = false;
};

struct Event {
  Context* context;
  std::vector<std::shared_ptr<Mark>> marks;  // none: not recorded yet
  bool captured = false;                     // recorded in a stream that is captured
};

// Lives to the end of the process: a caller may wait for room in one that another thread destroys. Under the lock of
// all but for what `mutex` is for.
struct Stream {
  Stream(Context* context, bool blocking);
  // What the application puts here. With the legacy default stream and those that synchronise with it, it waits for
  // what the other has been given until now. Lets go of the lock while the stream has kPendingMax pieces of work
  // already: of what is under it nothing is as before. REQUIRES: the lock.
  void add(std::function<void()> work);
  std::shared_ptr<Mark> add_mark();  // the same, of the end of all that is here then
  // A mark that waits for nothing but this stream, takes no room, and changes no order; null when the stream has no
  // work, for the thread of a destroyed stream ends with its last work and would never reach a mark that is put behind
  // it. REQUIRES: the lock.
  std::shared_ptr<Mark> end_of_now();

  Context* const context;
  const bool blocking;    // synchronises with the legacy default stream
  bool captured = false;  // its work goes into a graph
  bool green = false;     // of a green context of `context`
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  std::size_t pending = 0;  // in the queue, and under way
  bool ended = false;       // destroyed by the application: its thread ends when its work has

 private:
  void push(std::function<void()> work);
  // REQUIRES: `mutex`, and that the caller notifies `changed`.
  std::shared_ptr<Mark> push_mark();
  void wait_for_room();
  void follow_implicitly();
};

void wait_for(const std::shared_ptr<Mark>& mark);
// All work so far of the chosen streams, also of destroyed ones. REQUIRES: the lock.
std::vector<std::shared_ptr<Mark>> ends_of_now(const std::function<bool(const Stream&)>& chosen);
// All work so far of all streams of a device, also of destroyed ones. REQUIRES: the lock.
std::vector<std::shared_ptr<Mark>> ends_on(int device);
// Returns when that has ended. Lets go of the lock meanwhile: of what is under it nothing is as before. REQUIRES: the
// lock.
void wait_for_device(std::unique_lock<std::mutex>& lock, int device);
// The same for calls that take memory away, unless "unmap_waits" is 0.
void wait_to_unmap(std::unique_lock<std::mutex>& lock, int device);
// A stream of the current context, for `call`: null, and the code that says why, without one. Ends the process if
// the handle is invalid. REQUIRES: the lock.
Stream* enter_stream(const char* call, const std::string& argument, void* handle, int& code);
// The stream with this handle in this context; the same. REQUIRES: the lock.
Stream* stream_of(const char* call, void* handle, Context* context);
// The event with this handle; the same. REQUIRES: the lock.
Event* event_of(const char* call, void* handle);
// Modules that were loaded and not unloaded (modules.cpp); forgets them, and what kernels do. REQUIRE: the lock.
std::size_t modules_left();
void forget_modules();
// For what a real driver does not check: prints it and ends the process.
[[noreturn]] void undefined(const std::string& call, const std::string& what);

struct State {
  State();

  std::mutex mutex;
  std::string calls;
  std::map<std::string, std::size_t> counts;
  std::map<std::string, int> failures;
  std::map<std::string, int> settings;
  int fail_in = 0;  // calls; 0: never
  int fail_code = 0;
  bool failed = false;
  int current_device = -1;
  std::string text;  // of the last answer

  Context contexts[kDevicesMax];
  std::atomic<std::size_t> used[kDevicesMax] = {};
  std::byte* window;  // of device addresses
  std::size_t window_used = 0;
  std::map<Address, Range> ranges;
  std::map<Address, std::shared_ptr<Physical>> handles;
  Address next_handle = 1;
  std::map<Address, std::size_t> registered;  // host memory
  // By handle. No handle is given twice, so that one that was destroyed is known.
  std::map<std::uintptr_t, Stream*> streams;
  std::map<std::uintptr_t, Event*> events;
  std::uintptr_t next_object = 0x10000;
  std::vector<std::unique_ptr<Stream>> all_streams;  // that there ever were
  std::set<Stream*> working;  // all that have a thread: those above, default ones, and destroyed ones with work left
  std::condition_variable_any stopped;  // one of those is no more
  std::multiset<int> held;              // devices of streams that are to wait for a word, each so often
  bool initialized = false;             // cuInit was called
  bool forked = false;                  // after that, in the parent: nothing works here
};

State& state();  // never destroyed
std::map<std::string, int> default_settings();

// Host functions of streams call nothing of the driver.
extern thread_local bool in_host_function;
// The contexts that this thread has pushed.
extern thread_local std::vector<Context*> current_stack;

// The first step of a call: counts it, and returns the code with which it is to fail. REQUIRES: the lock.
int enter(const std::string& call, const std::string& argument);
// The same of a call that needs a context: null, and the code that says why, without one that works.
Context* enter_context(const std::string& call, const std::string& argument, int& code);
// The context on top of this thread's, or null.
Context* current_context();

bool on_device(Address address);
// Where the CPU finds [address, address + bytes) when `device` accesses it; null when it may not, or nothing is there.
// An address that is not a device's is itself.
std::byte* host_address(Address address, std::size_t bytes, int device);
// Keeps that memory mapped here, whatever happens to it; null for host memory.
std::shared_ptr<Physical> physical_at(Address address);
bool is_registered(Address address, std::size_t bytes);

}  // namespace kvpool::fake_cuda
