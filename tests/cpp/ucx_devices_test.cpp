// Which memory of a GPU UCX is given, over a table of functions that stand for UCX.
#include "kvpool/routes/ucx/ucx_devices.h"

#include <doctest/doctest.h>

#include <cstring>
#include <string>
#include <vector>

#include "block_memory.h"
#include "kvpool/routes/ucx/ucx_memory.h"
#include "thrown.h"

namespace kvpool::testing {
namespace {

// What it was asked, and what it answers.
struct FakeUcx {
  struct Mapped {
    std::uint64_t base;
    std::uint64_t bytes;
    bool cuda;
  };
  bool has_cuda = true;
  ucs_status_t query = UCS_OK;
  ucs_status_t map = UCS_OK;  // of a GPU's memory
  int maps_before_failure = 0;
  std::vector<Mapped> mapped;
  std::size_t unmapped = 0;
};

FakeUcx& fake() {
  static FakeUcx one;
  return one;
}

UcxLibrary table(unsigned minor) {
  fake() = {};
  UcxLibrary ucx;
  ucx.path = "/somewhere/libucp.so.0";
  ucx.version = "1." + std::to_string(minor) + ".0";
  ucx.minor = minor;
  ucx.status_string = [](ucs_status_t) { return "it does not"; };
  ucx.context_query = [](ucp_context_h, ucp_context_attr_t* attributes) {
    KVPOOL_CHECK(attributes->field_mask == UCP_ATTR_FIELD_MEMORY_TYPES);
    attributes->memory_types = 1U << UCS_MEMORY_TYPE_HOST;
    if (fake().has_cuda) attributes->memory_types |= 1U << UCS_MEMORY_TYPE_CUDA;
    return fake().query;
  };
  ucx.mem_map = [](ucp_context_h, const ucp_mem_map_params_t* params, ucp_mem_h* handle) {
    const bool cuda =
        (params->field_mask & UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE) != 0 && params->memory_type == UCS_MEMORY_TYPE_CUDA;
    if (cuda && fake().map != UCS_OK && fake().maps_before_failure-- <= 0) return fake().map;
    fake().mapped.push_back({reinterpret_cast<std::uint64_t>(params->address), params->length, cuda});
    *handle = reinterpret_cast<ucp_mem_h>(fake().mapped.size());  // NOLINT(performance-no-int-to-ptr)
    return UCS_OK;
  };
  ucx.mem_unmap = [](ucp_context_h, ucp_mem_h) {
    ++fake().unmapped;
    return UCS_OK;
  };
  ucx.rkey_pack = [](ucp_context_h, ucp_mem_h, void** key, std::size_t* bytes) {
    *bytes = 4;
    *key = new char[*bytes]{'k', 'e', 'y', '!'};
    return UCS_OK;
  };
  ucx.rkey_buffer_release = [](void* key) { delete[] static_cast<char*>(key); };
  return ucx;
}

std::byte* at(std::uint64_t address) {
  return reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
}

constexpr std::uint64_t kHbmAt = 0x7000'0000'0000;
constexpr std::uint64_t kDramAt = 0x1000'0000;

// HBM of two segments that touch, ten blocks of 256 bytes each, on a GPU; DRAM of one.
UcxLocal local(UcxGpuMemory memory) {
  UcxLocal local;
  local.spans[0] = {10, {{at(kHbmAt), 256, 256}, {at(kHbmAt + 2560), 256, 256}}};
  local.spans[1] = {4, {{at(kDramAt), 512, 512}}};
  local.on_gpu[0] = memory;
  return local;
}

TEST_CASE("ucx on a GPU: what it says that it cannot do is not tried") {
  using Memory = UcxGpuMemory;
  const auto why = [](unsigned minor, Memory memory, bool has_cuda = true, ucs_status_t query = UCS_OK) {
    const UcxLibrary ucx = table(minor);
    fake().has_cuda = has_cuda;
    fake().query = query;
    return why_not_by_ucx(ucx, nullptr, memory);
  };
  for (const Memory memory : {Memory::kPlain, Memory::kVirtual, Memory::kTensors}) CHECK(why(22, memory).empty());
  CHECK(why(16, Memory::kPlain).empty());
  CHECK(why(21, Memory::kTensors).empty());
  CHECK(why(21, Memory::kVirtual).find("device_memory=\"plain\"") != std::string::npos);
  CHECK(why(15, Memory::kPlain).find("1.16") != std::string::npos);
  CHECK(why(22, Memory::kPlain, false).find("without CUDA") != std::string::npos);
  CHECK(why(22, Memory::kPlain, true, UCS_ERR_INVALID_PARAM).find("without CUDA") != std::string::npos);
  CHECK(why(22, Memory::kUnknown).find("IPC handle") != std::string::npos);
}

TEST_CASE("ucx on a GPU: memory is registered as its own kind, and one key opens an allocation") {
  const UcxLibrary ucx = table(22);
  {
    const UcxMemory memory(ucx, nullptr, local(UcxGpuMemory::kVirtual));
    REQUIRE(memory.regions().size() == 2);
    CHECK(memory.regions()[0].base == kDramAt);  // in order of addresses
    CHECK_FALSE(memory.regions()[0].on_gpu);
    CHECK(memory.regions()[1].base == kHbmAt);
    CHECK(memory.regions()[1].bytes == 5120);
    CHECK(memory.regions()[1].on_gpu);
    CHECK(memory.regions()[1].key.size() == 4);
    CHECK(memory.find(at(kHbmAt + 5119)) == &memory.regions()[1]);
    CHECK(memory.find(at(kHbmAt + 5120)) == nullptr);
    CHECK(memory.spans()[Medium::kHbm].blocks == 10);
    CHECK(memory.refused()[0].empty());
    CHECK(fake().mapped.size() == 2);
    CHECK(fake().mapped[0].cuda);
    CHECK_FALSE(fake().mapped[1].cuda);
  }
  CHECK(fake().unmapped == 2);
}

TEST_CASE("ucx on a GPU: what it takes is given to peers as handles, unless the driver keeps it alive for them") {
  const UcxLibrary ucx = table(22);
  CHECK(UcxMemory(ucx, nullptr, local(UcxGpuMemory::kPlain)).gives_handles());
  CHECK(UcxMemory(ucx, nullptr, local(UcxGpuMemory::kTensors)).gives_handles());
  CHECK_FALSE(UcxMemory(ucx, nullptr, local(UcxGpuMemory::kVirtual)).gives_handles());
  UcxLocal host = local(UcxGpuMemory::kPlain);
  host.on_gpu[0].reset();
  CHECK_FALSE(UcxMemory(ucx, nullptr, host).gives_handles());
  fake().has_cuda = false;  // then the medium is left out
  CHECK_FALSE(UcxMemory(ucx, nullptr, local(UcxGpuMemory::kPlain)).gives_handles());
}

TEST_CASE("ucx on a GPU: peers take descriptors of this process only for memory that UCX was given") {
  const UcxLibrary ucx = table(22);
  const UcxLocal made_virtual = local(UcxGpuMemory::kVirtual);
  CHECK(passes_descriptors(made_virtual, UcxMemory(ucx, nullptr, made_virtual).refused()));
  const UcxLocal plain = local(UcxGpuMemory::kPlain);
  CHECK_FALSE(passes_descriptors(plain, UcxMemory(ucx, nullptr, plain).refused()));
  fake().has_cuda = false;  // then UCX is not given the medium
  CHECK_FALSE(passes_descriptors(made_virtual, UcxMemory(ucx, nullptr, made_virtual).refused()));
}

TEST_CASE("ucx on a GPU: an engine's tensors are registered one by one, though they touch") {
  const UcxLibrary ucx = table(22);
  const UcxMemory memory(ucx, nullptr, local(UcxGpuMemory::kTensors));
  REQUIRE(memory.regions().size() == 3);
  CHECK(memory.regions()[1].bytes == 2560);
  CHECK(memory.regions()[2].base == kHbmAt + 2560);
}

TEST_CASE("ucx on a GPU: a medium that it does not take is left out, and the others stay") {
  const UcxLibrary ucx = table(22);
  fake().has_cuda = false;
  const UcxMemory memory(ucx, nullptr, local(UcxGpuMemory::kPlain));
  CHECK(memory.regions().size() == 1);
  CHECK(memory.spans()[Medium::kHbm].blocks == 0);
  CHECK(memory.spans()[Medium::kDram].blocks == 4);
  CHECK(memory.refused()[0].find("without CUDA") != std::string::npos);
  CHECK(memory.refused()[1].empty());
}

TEST_CASE("ucx on a GPU: memory that it refuses when it is registered leaves nothing registered of its medium") {
  const UcxLibrary ucx = table(22);
  fake().map = UCS_ERR_IO_ERROR;
  fake().maps_before_failure = 1;  // of two tensors
  {
    const UcxMemory memory(ucx, nullptr, local(UcxGpuMemory::kTensors));
    CHECK(memory.regions().size() == 1);
    CHECK(memory.spans()[Medium::kHbm].blocks == 0);
    CHECK(memory.refused()[0].find("ucp_mem_map") != std::string::npos);
    CHECK(fake().unmapped == 1);
  }
  CHECK(fake().unmapped == fake().mapped.size());
}

PeerMetadata metadata_of(MemoryKind kind) {
  PeerMetadata metadata;
  metadata.media[Medium::kHbm].blocks = 10;
  metadata.media[Medium::kHbm].kind = kind;
  metadata.media[Medium::kHbm].segments = {{kHbmAt, 256, 256}, {kHbmAt + 2560, 256, 256}};
  metadata.media[Medium::kDram].blocks = 4;
  metadata.media[Medium::kDram].segments = {{kDramAt, 512, 512}};
  return metadata;
}

TEST_CASE("ucx on a GPU: a peer's medium is reached when its keys open all of it, and may be left out") {
  const UcxBlob::Region dram{kDramAt, 2048, Bytes(4)};
  const UcxBlob::Region half{kHbmAt, 2560, Bytes(4)};
  const UcxBlob::Region whole{kHbmAt, 5120, Bytes(4)};
  UcxBlob blob;
  blob.regions = {dram, whole};
  CHECK(require_covered(metadata_of(MemoryKind::kGpu), blob) == MediaSet{true, true});
  CHECK(require_covered(metadata_of(MemoryKind::kHost), blob) == MediaSet{true, true});
  blob.regions = {dram};
  CHECK(require_covered(metadata_of(MemoryKind::kGpu), blob) == MediaSet{false, true});
  CHECK(code_of([&] { require_covered(metadata_of(MemoryKind::kHost), blob); }) == ErrorCode::kProtocol);
  blob.regions = {dram, half};
  CHECK(code_of([&] { require_covered(metadata_of(MemoryKind::kGpu), blob); }) == ErrorCode::kProtocol);
  blob.regions = {whole};
  CHECK(code_of([&] { require_covered(metadata_of(MemoryKind::kGpu), blob); }) == ErrorCode::kProtocol);
}

}  // namespace
}  // namespace kvpool::testing
