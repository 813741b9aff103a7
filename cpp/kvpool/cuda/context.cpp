#include "kvpool/cuda/context.h"

#include <string>

#include "kvpool/base/error.h"
#include "kvpool/base/fork_guard.h"

namespace kvpool {
namespace {

// What cuInit says in a process that was forked from one that had called it.
constexpr CuResult kNotInitialized = 3;

// The driver, ready to be asked.
const CudaDriver& started_driver(const char* what) {
  const CudaDriver* driver = nullptr;
  try {
    driver = &CudaDriver::get();
  } catch (const Error& error) {
    throw Error(error.code(), std::string(what) + ": " + error.what());
  }
  const CuResult started = driver->init(0);
  if (started == kNotInitialized) {
    throw Error(ErrorCode::kFork,
                std::string(what) +
                    ": CUDA works in no process that was forked after its parent had used CUDA; start the "
                    "process anew instead (multiprocessing: the start method \"spawn\")",
                {{"driver_code", started}});
  }
  driver->require(started, "cuInit", what);
  return *driver;
}

CuDevice device_with(const CudaDriver& driver, int ordinal, const char* what) {
  CuDevice device = 0;
  const CuResult result = driver.device_get(&device, ordinal);
  if (result == kCudaInvalidDevice || result == kCudaNoDevice) {
    int count = 0;
    if (driver.device_get_count(&count) != kCudaSuccess) count = 0;
    throw Error(ErrorCode::kUnsupported,
                std::string(what) + ": there is no GPU " + std::to_string(ordinal) + "; the CUDA driver shows " +
                    std::to_string(count) + " (CUDA_VISIBLE_DEVICES chooses among those of the machine)",
                {{"driver_code", result}});
  }
  driver.require(result, "cuDeviceGet", what);
  return device;
}

}  // namespace

std::shared_ptr<const CudaContext> CudaContext::retain(int ordinal, const char* what) {
  const CudaDriver& driver = started_driver(what);
  const CuDevice device = device_with(driver, ordinal, what);
  return std::shared_ptr<const CudaContext>(new CudaContext(driver, device, ordinal, what));
}

std::shared_ptr<const CudaContext> CudaContext::retain_current(const char* what) {
  const CudaDriver& driver = started_driver(what);
  CuDevice device = 0;
  if (driver.ctx_get_device(&device) != kCudaSuccess) device = device_with(driver, 0, what);
  return std::shared_ptr<const CudaContext>(new CudaContext(driver, device, device, what));
}

CudaContext::CudaContext(const CudaDriver& driver, CuDevice device, int ordinal, const char* what)
    : driver_(driver), device_(device), ordinal_(ordinal), generation_(fork_generation()) {
  if (driver_.driver_get_version(&driver_version_) != kCudaSuccess) driver_version_ = 0;
  driver_.require(driver_.primary_ctx_retain(&context_, device_), "cuDevicePrimaryCtxRetain", what);
}

// At the end of the process the driver may have shut down already; nothing is lost when the call fails then.
CudaContext::~CudaContext() {
  if (usable()) driver_.primary_ctx_release(device_);
}

bool CudaContext::usable() const noexcept { return generation_ == fork_generation(); }

int CudaContext::attribute(int attribute, const char* what) const {
  int value = 0;
  const CuResult result = driver_.device_get_attribute(&value, attribute, device_);
  if (fault_of(result) == CudaFault::kArgument) return 0;  // newer than the driver
  driver_.require(result, "cuDeviceGetAttribute", what);
  return value;
}

CurrentContext::CurrentContext(const CudaContext& context, const char* what)
    : context_(context), current_(true), capture_mode_(kCuCaptureModeRelaxed) {
  context.driver().require(context.driver().ctx_push(context.handle()), "cuCtxPushCurrent", what);
  exchange_capture_mode();
}

CurrentContext::CurrentContext(const CudaContext& context) noexcept
    : context_(context),
      current_(context.usable() && context.driver().ctx_push(context.handle()) == kCudaSuccess),
      capture_mode_(kCuCaptureModeRelaxed) {
  if (current_) exchange_capture_mode();
}

// When it fails the mode stays as it is, here and in the driver.
void CurrentContext::exchange_capture_mode() noexcept {
  const auto exchange = context_.driver().exchange_capture_mode;
  if (exchange != nullptr) exchange(&capture_mode_);
}

CurrentContext::~CurrentContext() {
  if (!current_) return;
  exchange_capture_mode();
  CuContext popped = nullptr;
  context_.driver().ctx_pop(&popped);
}

}  // namespace kvpool
