// UCX as it is: N puts and a flush, in one call from Python. Built by ucx.py against the headers of the libucx wheel.
//
// One worker, one endpoint, one thread. Every function returns null, or what went wrong; the text stays valid.
#include <ucp/api/ucp.h>

#include <cstdint>
#include <cstring>
#include <vector>

namespace {

struct Side {
  ucp_context_h context = nullptr;
  ucp_worker_h worker = nullptr;
  ucp_ep_h peer = nullptr;
  ucp_mem_h memory = nullptr;
  ucp_rkey_h key = nullptr;
  std::uint64_t base = 0;
  std::vector<void*> requests;
};

Side side;

const char* text(ucs_status_t status) { return status == UCS_OK ? nullptr : ucs_status_string(status); }

ucs_status_t finish(void* request) {
  if (request == nullptr) {
    return UCS_OK;
  }
  if (UCS_PTR_IS_ERR(request)) {
    return UCS_PTR_STATUS(request);
  }
  ucs_status_t status = UCS_INPROGRESS;
  while ((status = ucp_request_check_status(request)) == UCS_INPROGRESS) {
    ucp_worker_progress(side.worker);
  }
  ucp_request_free(request);
  return status;
}

// Copies what there is room for, and says how much there is.
void give(const void* from, std::size_t bytes, char* to, std::uint64_t* capacity) {
  if (bytes <= *capacity) {
    std::memcpy(to, from, bytes);
  }
  *capacity = bytes;
}

}  // namespace

extern "C" {

const char* side_open() {
  ucp_config_t* config = nullptr;
  if (const ucs_status_t status = ucp_config_read(nullptr, nullptr, &config); status != UCS_OK) {
    return text(status);
  }
  ucp_params_t parameters{};
  parameters.field_mask = UCP_PARAM_FIELD_FEATURES;
  parameters.features = UCP_FEATURE_RMA;
  ucs_status_t status = ucp_init(&parameters, config, &side.context);
  ucp_config_release(config);
  if (status != UCS_OK) {
    return text(status);
  }
  ucp_worker_params_t worker{};
  worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  return text(ucp_worker_create(side.context, &worker, &side.worker));
}

// Registers memory; with base 0 UCX allocates it, which is what its own shared memory needs.
const char* side_map(std::uint64_t base, std::uint64_t bytes, std::uint64_t* mapped) {
  ucp_mem_map_params_t parameters{};
  parameters.field_mask =
      UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS | UCP_MEM_MAP_PARAM_FIELD_ADDRESS;
  parameters.length = bytes;
  parameters.address = reinterpret_cast<void*>(base);
  parameters.flags = base == 0 ? UCP_MEM_MAP_ALLOCATE : 0;
  if (const ucs_status_t status = ucp_mem_map(side.context, &parameters, &side.memory); status != UCS_OK) {
    return text(status);
  }
  ucp_mem_attr_t attributes{};
  attributes.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS;
  const ucs_status_t status = ucp_mem_query(side.memory, &attributes);
  side.base = *mapped = reinterpret_cast<std::uint64_t>(attributes.address);
  return text(status);
}

const char* side_metadata(char* address, std::uint64_t* address_bytes, char* key, std::uint64_t* key_bytes) {
  ucp_address_t* worker = nullptr;
  std::size_t bytes = 0;
  if (const ucs_status_t status = ucp_worker_get_address(side.worker, &worker, &bytes); status != UCS_OK) {
    return text(status);
  }
  give(worker, bytes, address, address_bytes);
  ucp_worker_release_address(side.worker, worker);
  void* packed = nullptr;
  if (const ucs_status_t status = ucp_rkey_pack(side.context, side.memory, &packed, &bytes); status != UCS_OK) {
    return text(status);
  }
  give(packed, bytes, key, key_bytes);
  ucp_rkey_buffer_release(packed);
  return nullptr;
}

const char* side_meet(const char* address, const char* key) {
  ucp_ep_params_t parameters{};
  parameters.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS;
  parameters.address = reinterpret_cast<const ucp_address_t*>(address);
  if (const ucs_status_t status = ucp_ep_create(side.worker, &parameters, &side.peer); status != UCS_OK) {
    return text(status);
  }
  return text(ucp_ep_rkey_unpack(side.peer, key, &side.key));
}

const char* side_put(const std::uint64_t* from, const std::uint64_t* to, std::uint64_t count, std::uint64_t bytes) {
  ucp_request_param_t put{};
  put.op_attr_mask = UCP_OP_ATTR_FIELD_MEMH;
  put.memh = side.memory;
  side.requests.resize(count);
  for (std::uint64_t i = 0; i < count; ++i) {
    side.requests[i] = ucp_put_nbx(side.peer, reinterpret_cast<const void*>(from[i]), bytes, to[i], side.key, &put);
  }
  const ucp_request_param_t flush{};
  ucs_status_t status = finish(ucp_ep_flush_nbx(side.peer, &flush));
  for (void* request : side.requests) {
    if (const ucs_status_t one = finish(request); one != UCS_OK) {
      status = one;
    }
  }
  return text(status);
}

void side_progress() { ucp_worker_progress(side.worker); }

// Forgets the peer and the memory; the worker stays.
const char* side_end() {
  ucs_status_t status = UCS_OK;
  if (side.key != nullptr) {
    ucp_rkey_destroy(side.key);
  }
  if (side.peer != nullptr) {
    ucp_request_param_t close{};
    status = finish(ucp_ep_close_nbx(side.peer, &close));
  }
  if (side.memory != nullptr) {
    ucp_mem_unmap(side.context, side.memory);
  }
  side.key = nullptr;
  side.peer = nullptr;
  side.memory = nullptr;
  return text(status);
}

}  // extern "C"
