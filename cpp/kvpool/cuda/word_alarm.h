// A dedicated thread that sets words which were not set in time.
//
// A word is set when a fetch ends, at its deadline at the latest. Threads of the pool check deadlines, but these
// threads also call the driver, and some driver calls wait for all work of the GPU (unmapping memory when a peer
// leaves, say): a thread in such a call would wait for a stream that waits for this thread's word.
//
// Thread-safety: all of it. The thread runs while there are words, and ends after a while without any.
#pragma once

#include <cstdint>

namespace kvpool {

class WaitWord;

class WordAlarm {
 public:
  // Sets the word by force at this time (CLOCK_MONOTONIC), unless it is removed before. Throws kState when no thread
  // can be started, std::bad_alloc.
  static void add(std::int64_t at_ns, WaitWord& word);
  // When this returns, the thread no longer touches the word. Does nothing for a word that was not added.
  static void remove(std::int64_t at_ns, WaitWord& word) noexcept;
};

}  // namespace kvpool
