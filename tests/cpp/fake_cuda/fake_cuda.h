// What a test asks of the fake driver, beside the driver's own entry points. All are exported with C names and looked
// up by dlsym: the library is loaded like the real one.
#pragma once

namespace kvpool::fake_cuda {

using ResetFunction = void();                           // fake_cuda_reset: forgets everything below
using FailFunction = void(const char* call, int code);  // fake_cuda_fail: from now on this call returns the code
using SetCurrentFunction = void(int device);            // fake_cuda_set_current: a context of it is current; -1: none
using CallsFunction = const char*();                    // fake_cuda_calls: "cuInit(0) cuDeviceGet(0) ..."

}  // namespace kvpool::fake_cuda
