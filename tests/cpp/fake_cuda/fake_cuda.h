// The functions for tests of the fake driver, beside the driver's own entry points. All are exported with C names and
// looked up by dlsym: the library is loaded like the real one.
//
// The fake has four GPUs of 256 MiB each. Their memory has addresses that only the fake can access: code that
// reads it as if it were the CPU's dies of SIGSEGV at that place. Streams are threads, and every piece of their work
// waits a little before it begins: two streams without a requested order run in any order. Addresses and contexts
// that are wrong are refused as the driver refuses them; work whose memory went before it ran ends the context, as on a
// GPU (CUDA_ERROR_ILLEGAL_ADDRESS). A stream that is captured (cuStreamBeginCapture) pulls in those that wait for its
// events, and their copies are not made.
//
// It is at least as strict as the driver:
//   - A stream or an event that was never made, or was destroyed, ends the process with a message: the driver does not
//     check them.
//   - The legacy default stream (0 and 1) and every stream that was not made with CU_STREAM_NON_BLOCKING wait for each
//     other; nothing may be put into it while such a stream is captured.
//   - A stream takes kPendingMax pieces of work; a caller that has more waits for room.
//   - cuStreamDestroy returns at once, and the stream's work goes on.
//   - A call that frees memory waits for all work of the GPU, and so does loading a module (the fake NCCL's first
//     communicator on a GPU). "waits behind words" counts how often a stream waited for a word then.
//   - Plain memory (cuMemAlloc) is reached by its own GPU, and by others after cuCtxEnablePeerAccess.
//   - Attributes of devices have the numbers of cuda.h; others are CUDA_ERROR_INVALID_VALUE. An attribute without a
//     value in the fake ends the process.
//   - Each thread has a per-thread default stream (2) to itself.
//   - A host function of a stream that calls the driver is answered CUDA_ERROR_NOT_PERMITTED.
//   - A child that is forked after cuInit has no driver: CUDA_ERROR_NOT_INITIALIZED, from cuInit too.
//   - Host memory is registered once, and only where it is mapped.
//
// Kernels run in the streams, too, where FAKE_CUDA_KERNELS names a library of them: launch.cpp and ../host_kernels.
#pragma once

#include <cstddef>

namespace kvpool::fake_cuda {

// fake_cuda_reset: forgets what is set below, and the calls. A forked child that calls it stands for a process that was
// started by itself.
using ResetFunction = void();
// fake_cuda_go_on_after_fork: this forked child has what its parent had, but for the work of streams: for tests of what
// ends a process.
using GoOnFunction = void();
using FailFunction = void(const char* call, int code);  // fake_cuda_fail: from now on this call returns the code
using FailNthFunction = void(int n, int code);          // fake_cuda_fail_nth: of the calls from now on, the n-th does
using FailedFunction = bool();                          // fake_cuda_failed: whether it was reached
using SetCurrentFunction = void(int device);            // fake_cuda_set_current: a context of it is current; -1: none
using CallsFunction = const char*();                    // fake_cuda_calls: "cuInit(0) cuDeviceGet(0) ..."
using LoseFunction = void(int device, int code);        // fake_cuda_lose: its context answers this code from now on
using SetFunction = void(const char* name, int value);  // fake_cuda_set: of kSettings, below

// fake_cuda_left: what was taken and not given back, "" for nothing: "bytes=2097152 handles=1 contexts=1 ...".
using LeftFunction = const char*();
// fake_cuda_count: how often this was called, or of kCounts, below.
using CountFunction = std::size_t(const char* name);
// fake_cuda_make_green: from now on the stream is one of a green context of its GPU.
using MakeGreenFunction = void(void* stream);
// fake_cuda_load_module: waits for all work of the GPU, as what loads a module there.
using LoadModuleFunction = void(int device);
// fake_cuda_host: where the CPU finds the bytes of device memory; other addresses as they are. Null: not mapped.
using HostFunction = void*(unsigned long long address, std::size_t bytes);
// fake_cuda_host_of: the same of memory that this GPU has itself; null for any other.
using HostOfFunction = void*(int device, unsigned long long address, std::size_t bytes);

// The settings of fake_cuda_set:
//   "devices"         how many there are                                    4
//   "memory_mib"      of each                                               256
//   "version"         of the driver                                         13000
//   "virtual_memory"  whether it has cuMem*                                 1
//   "ipc"             whether it gives IPC handles                          1
//   "hold_register"   from so many bytes on, cuMemHostRegister returns when
//                     this has become 0 again; 0: at once                   0
//   "unmap_waits"     whether calls that free memory (cuMemFree, cuMemUnmap,
//                     cuIpcCloseMemHandle, cuMemHostUnregister) wait for
//                     all work of the GPU. 0 is for tests of who frees what
//                     is still written                                      1
//   "l2_kib"          CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE                     4096
//   "compute_mode"    CU_DEVICE_ATTRIBUTE_COMPUTE_MODE; 3: exclusive        0
//   "compute_capability" 10 times the major number, and the minor one       90
//   "shared_optin"    MAX_SHARED_MEMORY_PER_BLOCK_OPTIN                     232448
//   "delay_us"        that a piece of a stream's work waits, at most        200
//   "wait_value"      whether streams can wait for words                     1
//   "wait_s"          after which such a wait ends the context               30
//   "one_queue"       whether the work of all streams of a context goes
//                     through one queue, in the order in which it came       0
//   "capturing"       whether some thread captures a graph in global mode   0
// Meanwhile calls that are unsafe then are refused in threads whose mode is not relaxed, and those that look at a whole
// context in every thread; each of them breaks the capture.
// fake_cuda_count counts calls, and:
//   "bytes"           of all devices, in use now
//   "pageable"        copies between a device and host memory that was not registered
//   "waits passed"    of streams for words
//   "copied"          pieces that streams have copied, and kernels that they have begun
//   "bytes copied"    by those
//   "callers held up" that found a stream full
//   "waits behind words" calls that waited for all work of a GPU where a stream waited for a word
//   "modules loaded"  by fake_cuda_load_module and cuModuleLoadData
//   "loaded at a launch" kernels, which waited for all work of the GPU (../fake_cubin.h)
//   "captures broken" calls that were refused because of a capture

}  // namespace kvpool::fake_cuda
