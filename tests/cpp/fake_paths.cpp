#include "fake_paths.h"

namespace kvpool::testing {

const char* fake_cuda_path() { return KVPOOL_FAKE_CUDA_PATH; }
const char* fake_nccl_path() { return KVPOOL_FAKE_NCCL_PATH; }
const char* host_kernels_path() { return KVPOOL_HOST_KERNELS_PATH; }
const char* dynamic_tls_path() { return KVPOOL_DYNAMIC_TLS_PATH; }

}  // namespace kvpool::testing
