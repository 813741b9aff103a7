// A dedicated thread that sets words which were not set in time.
//
// A word is set when a fetch ends, at its deadline at the latest, which threads of the pool poll. But these threads
// also call the driver, and some driver calls wait for all work of the GPU (unmapping memory when a peer leaves, say):
// a thread in such a call would wait for a stream that waits for this thread's word.
//
// Thread-safety: all of it. The thread is started when there are words, and ends when there have been none for a while.
#pragma once

#include <cstdint>

namespace kvpool {

class WaitWord;

class WordAlarm {
 public:
  // At this time (CLOCK_MONOTONIC) the word is set by force, unless it was removed. Throws kState when there is no
  // thread to be had, std::bad_alloc.
  static void add(std::int64_t at_ns, WaitWord& word);
  // The word is not touched any more when this has returned. Nothing happens to one that was not added.
  static void remove(std::int64_t at_ns, WaitWord& word) noexcept;
};

}  // namespace kvpool
