// Where the build put the libraries that tests open at run time: those that stand for the CUDA driver, for NCCL and for
// the kernels, and one with thread-local memory. Functions, not
// macros: a path on every compiler's command line would keep a compiler cache from serving two checkouts.
#pragma once

namespace kvpool::testing {

const char* fake_cuda_path();
const char* fake_nccl_path();
const char* host_kernels_path();
const char* dynamic_tls_path();

}  // namespace kvpool::testing
