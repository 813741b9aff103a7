// How the bindings reach the half of a pool that speaks with peers, and how they wait.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>

#include "arguments.h"
#include "gil.h"
#include "kvpool/base/error.h"
#include "kvpool/base/medium.h"
#include "kvpool/base/wait.h"
#include "kvpool/peers/peer_node.h"
#include "kvpool/peers/service.h"
#include "kvpool/pool/pool.h"

namespace kvpool::bindings {

// Of what has its own deadline, such as a transfer: waiting for it ends without a time for the wait.
inline constexpr std::int64_t kForever = INT64_MAX;

// Throws kState when the pool has none yet.
Service& service_of(const PeerNode& node);

pybind11::array_t<Address> alloc_at_peer(const PeerNode& node, std::size_t n, MediumChoice medium, bool evict,
                                         pybind11::handle peer, pybind11::handle timeout);

// For what waits in the core, without the GIL: whether a signal's handler has raised, Ctrl-C above all. Python runs
// handlers in the process's first thread; in other threads there is nothing to check.
GivenUp asks_for_signals();

// Calls call(given_up) without the GIL. What a signal's handler raised meanwhile is thrown in place of kCancelled.
template <class Call>
auto call_interruptibly(Call&& call) {
  try {
    const GivenUp given_up = asks_for_signals();
    const GilReleased released;
    return call(given_up);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kCancelled && PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
    throw;
  }
}

// Calls step(until_ns) without the GIL until it returns true or the time comes; signals are looked at in between, so
// that Ctrl-C ends the wait by throwing. Returns whether step did.
template <class Step>
bool wait_interruptibly(std::int64_t until_ns, Step&& step) {
  constexpr std::int64_t kSliceNs = 250'000'000;
  for (;;) {
    bool done = false;
    std::int64_t now = 0;
    {
      const GilReleased released;
      done = step(std::min(until_ns, steady_ns() + kSliceNs));
      now = steady_ns();
    }
    if (done) return true;
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
    if (now >= until_ns) return false;
  }
}

}  // namespace kvpool::bindings
