// How a peer can write here by itself, with the access that it was given, and what proves that it no longer writes.
#pragma once

namespace kvpool {

struct Exposure {
  bool by_process = false;    // its process writes, or the kernel for it: the end of the process is the proof
  bool by_address = false;    // of these, to addresses of this process, whatever memory is there by then
  bool by_gpu = false;        // of these, by a GPU that its process has given work: see WriterQuarantine
  bool by_handle = false;     // of these, to memory that it has open; that must not be freed before it is closed
  bool until_exit = false;    // of these, to memory that it keeps open until its process ends, whatever it says
  bool until_fence = false;   // content that it has sent may arrive after its end: the fence of its link is the proof
  bool beyond_files = false;  // of these, to memory that no file contains: what an engine has allocated

  bool any() const noexcept { return by_process || until_fence; }
  // Whether it may have memory open. `said_over`: it has said that it no longer writes.
  bool may_hold(bool said_over) const noexcept { return by_handle && (until_exit || !said_over); }
  // Adds the exposure by another transport.
  void add(const Exposure& other) noexcept {
    by_process = by_process || other.by_process;
    by_address = by_address || other.by_address;
    by_gpu = by_gpu || other.by_gpu;
    by_handle = by_handle || other.by_handle;
    until_exit = until_exit || other.until_exit;
    until_fence = until_fence || other.until_fence;
    beyond_files = beyond_files || other.beyond_files;
  }
};

}  // namespace kvpool
