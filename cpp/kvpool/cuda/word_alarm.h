// Sets words that are not set in time, by a thread that does nothing else.
//
// A word is set when a fetch ends, at its deadline at the latest, which threads of the pool look at. But these call the
// driver, too, and there are calls of it that wait for all work of the GPU (memory that is unmapped when a peer leaves,
// say): a thread that stands in one waits for the stream that waits for its word.
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
