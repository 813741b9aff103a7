#include "kvpool/routes/nccl/nccl_messages.h"

#include <cstring>

#include "kvpool/routes/nccl/nccl_pipe.h"

namespace kvpool {
namespace {

constexpr std::size_t kWhyBytesMax = 4096;
constexpr std::size_t kFieldsBytesMax = 256;  // of any message, but for its text or its blocks

[[noreturn]] void fail(const std::string& what) {
  throw Error(ErrorCode::kProtocol, "a message from the peer is malformed: " + what);
}

}  // namespace

Bytes write_body(const NcclChannelBody& body) {
  Bytes out;
  out.reserve(kFieldsBytesMax);
  WireWriter(out).number(body.generation).number(body.pass_bytes).raw(body.id.bytes, sizeof(body.id.bytes));
  return out;
}

Bytes write_body(const NcclPassBody& body) {
  Bytes out;
  out.reserve(kFieldsBytesMax);
  WireWriter writer(out);
  writer.number(body.generation).number(body.number).number(body.lifetime_ms);
  writer.number(body.bytes).number(body.message_bytes).raw(body.data.data(), body.data.size());
  return out;
}

Bytes write_body(const NcclPassedBody& body) {
  Bytes out;
  out.reserve(kFieldsBytesMax);
  WireWriter(out)
      .number(body.number)
      .number(static_cast<std::uint8_t>(body.outcome))
      .text(std::string_view(body.why).substr(0, kWhyBytesMax));
  return out;
}

Bytes write_halt(std::uint64_t generation) {
  Bytes out;
  out.reserve(kFieldsBytesMax);
  WireWriter(out).number(generation);
  return out;
}

NcclChannelBody read_channel(std::span<const std::byte> body) {
  WireReader in(body);
  NcclChannelBody channel;
  channel.generation = in.number<std::uint64_t>();
  channel.pass_bytes = in.number<std::uint64_t>();
  if (channel.pass_bytes < kNcclPassBytesMin || channel.pass_bytes > kNcclPassBytesMax) {
    fail("passes of " + std::to_string(channel.pass_bytes) + " bytes by NCCL; they can have " +
         std::to_string(kNcclPassBytesMin) + " to " + std::to_string(kNcclPassBytesMax));
  }
  std::memcpy(channel.id.bytes, in.take(sizeof(channel.id.bytes)).data(), sizeof(channel.id.bytes));
  in.finish();
  return channel;
}

NcclPassBody read_pass(std::span<const std::byte> body) {
  WireReader in(body);
  NcclPassBody pass;
  pass.generation = in.number<std::uint64_t>();
  pass.number = in.number<std::uint64_t>();
  pass.lifetime_ms = in.number<std::uint64_t>();
  pass.bytes = in.number<std::uint64_t>();
  pass.message_bytes = in.number<std::uint64_t>();
  if (pass.bytes == 0 || pass.bytes > kNcclPassBytesMax) {
    fail(std::to_string(pass.bytes) + " bytes by NCCL at a time; it can be 1 to " + std::to_string(kNcclPassBytesMax));
  }
  if (pass.message_bytes == 0 || (pass.bytes - 1) / pass.message_bytes >= kNcclMessagesMax) {
    fail("messages of " + std::to_string(pass.message_bytes) + " bytes");
  }
  const auto data = in.take(in.left());
  pass.data.assign(data.begin(), data.end());
  return pass;
}

NcclPassedBody read_passed(std::span<const std::byte> body) {
  WireReader in(body);
  NcclPassedBody passed;
  passed.number = in.number<std::uint64_t>();
  const auto outcome = in.number<std::uint8_t>();
  if (outcome > static_cast<std::uint8_t>(NcclOutcome::kUnable)) fail("no such outcome");
  passed.outcome = static_cast<NcclOutcome>(outcome);
  passed.why = in.text(kWhyBytesMax);
  in.finish();
  return passed;
}

std::uint64_t read_halt(std::span<const std::byte> body) {
  WireReader in(body);
  const auto generation = in.number<std::uint64_t>();
  in.finish();
  return generation;
}

}  // namespace kvpool
