// The UCX library, opened at run time: a table of the functions that kvpool calls.
//
// Uses only functions of UCX 1.13, except where `minor` allows more. Version 1 of the interface is compatible upward:
// structures carry masks of the fields that are set.
#pragma once

#include <ucp/api/ucp.h>

#include <string>

#include "kvpool/base/error.h"

namespace kvpool {

struct UcxLibrary {
  std::string path;     // of libucp
  std::string version;  // "1.22.0"
  unsigned minor = 0;   // of version 1
  bool shared = false;  // another library of this process had already opened it

  decltype(&::ucp_get_version) get_version = nullptr;
  decltype(&::ucp_get_version_string) get_version_string = nullptr;
  decltype(&::ucp_config_read) config_read = nullptr;
  decltype(&::ucp_config_modify) config_modify = nullptr;
  decltype(&::ucp_config_release) config_release = nullptr;
  decltype(&::ucp_init_version) init_version = nullptr;
  decltype(&::ucp_cleanup) cleanup = nullptr;
  decltype(&::ucp_context_query) context_query = nullptr;
  decltype(&::ucp_mem_map) mem_map = nullptr;
  decltype(&::ucp_mem_unmap) mem_unmap = nullptr;
  decltype(&::ucp_rkey_pack) rkey_pack = nullptr;
  decltype(&::ucp_rkey_buffer_release) rkey_buffer_release = nullptr;
  decltype(&::ucp_worker_create) worker_create = nullptr;
  decltype(&::ucp_worker_destroy) worker_destroy = nullptr;
  decltype(&::ucp_worker_get_address) worker_get_address = nullptr;
  decltype(&::ucp_worker_release_address) worker_release_address = nullptr;
  decltype(&::ucp_worker_get_efd) worker_get_efd = nullptr;
  decltype(&::ucp_worker_arm) worker_arm = nullptr;
  decltype(&::ucp_worker_progress) worker_progress = nullptr;
  decltype(&::ucp_ep_create) ep_create = nullptr;
  decltype(&::ucp_ep_close_nbx) ep_close_nbx = nullptr;
  decltype(&::ucp_ep_flush_nbx) ep_flush_nbx = nullptr;
  decltype(&::ucp_ep_print_info) ep_print_info = nullptr;
  decltype(&::ucp_ep_rkey_unpack) ep_rkey_unpack = nullptr;
  decltype(&::ucp_rkey_destroy) rkey_destroy = nullptr;
  decltype(&::ucp_put_nbx) put_nbx = nullptr;
  decltype(&::ucp_request_free) request_free = nullptr;
  decltype(&::ucs_status_string) status_string = nullptr;

  // Throws Error `code` with the call's name and UCX's text, unless `status` is success.
  void require(ucs_status_t status, const char* call, ErrorCode code = ErrorCode::kUnsupported) const;
};

// Opens UCX there (see UcxContext::make), or returns the copy that this process, or another library in it, has opened:
// a process can have only one, because symbols of a second copy would partly resolve to the first. Never closed,
// because UCX has threads and hooks. Throws kUnsupported.
const UcxLibrary& load_ucx(const std::string& where);

}  // namespace kvpool
