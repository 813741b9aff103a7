// The bodies of view, unview and attend: what is written is read again, and nothing else is.
#include "kvpool/views/view_messages.h"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "thrown.h"

namespace kvpool::testing {
namespace {

AttendBody asked() {
  AttendBody body{3, 4, DType::kFloat16, 0.25F, false, Priority::kPrefill, {}, {}};
  body.items.push_back({7, 2, 5000, {{0, 1024}, {2048, 5000}}});
  body.items.push_back({8, 1, 17, {{16, 18}}});
  body.q.resize(std::size_t{3} * 4 * 8 * 2, std::byte{9});
  return body;
}

constexpr std::uint32_t kHeadDim = 8;

PartialNode node(const TokenRange& range, std::uint32_t query_tokens, float value) {
  const PartialShape shape{query_tokens, 4, kHeadDim};
  return {range, KernelId{AttentionIsa::kAvx2, 1}, true, std::vector<float>(PartialNode::floats(shape), value)};
}

AttendedBody answer() {
  AttendedBody body{3, {}};
  body.items.push_back({7, {node({0, 1024}, 2, 1), node({2048, 4096}, 2, 2), node({4096, 5000}, 2, 3)}});
  body.items.push_back({8, {node({16, 18}, 1, 4)}});
  body.items[0].nodes[1].kernel = {AttentionIsa::kSm90, 1};
  body.items[1].nodes[0].exact = false;
  body.items[1].nodes[0].kernel.reset();
  return body;
}

TEST_CASE("requests to view, unview and attend are read as they were written") {
  const ViewBody view = read_view(write_body(ViewBody{5, true, 9, {1, 2, 3}}));
  CHECK(view.view == 5);
  CHECK(view.by_mapping);
  CHECK(view.first == 9);
  CHECK(view.addresses == std::vector<Address>{1, 2, 3});
  const UnviewBody unview = read_unview(write_body(UnviewBody{5, {9, 2}}));
  CHECK(unview.view == 5);
  CHECK(unview.blocks == BlockRange{9, 2});
  const AttendBody attend = read_attend(write_body(asked()));
  CHECK(attend.layer == 3);
  CHECK(attend.query_heads == 4);
  CHECK(attend.query_dtype == DType::kFloat16);
  CHECK(attend.scale == 0.25F);
  CHECK_FALSE(attend.causal);
  CHECK(attend.priority == Priority::kPrefill);
  REQUIRE(attend.items.size() == 2);
  CHECK(attend.items[0].view == 7);
  CHECK(attend.items[0].query_tokens == 2);
  CHECK(attend.items[0].query_begin == 5000);
  CHECK(attend.items[0].ranges == asked().items[0].ranges);
  CHECK(attend.q == asked().q);
  AttendBody without_scale = asked();
  without_scale.scale.reset();
  CHECK_FALSE(read_attend(write_body(without_scale)).scale.has_value());
}

TEST_CASE("the longest answer is as long as attended_bytes says") {
  std::size_t bytes = kAttendedHeaderBytes;
  for (const AttendBody::Item& item : asked().items) {
    bytes += attended_bytes(item.ranges, {item.query_tokens, 4, kHeadDim});
  }
  const std::size_t written = write_body(answer()).size();
  CHECK(written <= bytes);
  CHECK(written > bytes - kAttendedHeaderBytes);
}

TEST_CASE("an answer is read only as the answer to what was asked") {
  const Bytes bytes = write_body(answer());
  const AttendedBody read = read_attended(bytes, asked(), kHeadDim);
  REQUIRE(read.items[0].nodes.size() == 3);
  CHECK(read.items[0].nodes[0].kernel == KernelId{AttentionIsa::kAvx2, 1});
  CHECK(read.items[0].nodes[1].kernel == KernelId{AttentionIsa::kSm90, 1});
  CHECK(read.items[1].nodes[0].kernel == std::nullopt);
  CHECK(read.items[0].nodes[2].values == answer().items[0].nodes[2].values);
  CHECK_FALSE(read.items[1].nodes[0].exact);
  const auto refused = [&](auto change) {
    AttendBody other = asked();
    change(other);
    return code_of([&] { read_attended(bytes, other, kHeadDim); }) == ErrorCode::kProtocol;
  };
  CHECK(refused([](AttendBody& body) { body.layer = 4; }));
  CHECK(refused([](AttendBody& body) { body.items[1].view = 7; }));
  CHECK(refused([](AttendBody& body) { body.items.pop_back(); }));
  CHECK(refused([](AttendBody& body) { body.items[0].ranges[1].end = 5001; }));
  CHECK(refused([](AttendBody& body) { body.items[0].ranges.pop_back(); }));
  CHECK(refused([](AttendBody& body) { body.items[1].query_tokens = 2; }));
  CHECK(refused([](AttendBody& body) { body.query_heads = 8; }));
  AttendedBody contrary = answer();
  contrary.items[1].nodes[0].exact = true;  // of several kernels
  CHECK(code_of([&] { read_attended(write_body(contrary), asked(), kHeadDim); }) == ErrorCode::kProtocol);
}

TEST_CASE("requests with numbers that no pool of ours sends are refused") {
  const auto refused = [](auto change) {
    AttendBody body = asked();
    change(body);
    return code_of([&] { read_attend(write_body(body)); }) == ErrorCode::kProtocol;
  };
  CHECK(refused([](AttendBody& body) { body.items[0].ranges = {}; }));
  CHECK(refused([](AttendBody& body) { body.items[0].ranges = {{5, 5}}; }));
  CHECK(refused([](AttendBody& body) { body.items[0].ranges = {{5, 9}, {8, 10}}; }));
  CHECK(refused([](AttendBody& body) { body.items[0].ranges = {{5, 9}, {9, 10}}; }));
  CHECK(refused([](AttendBody& body) { body.items[0].ranges = {{5, kSequenceTokensMax + 1}}; }));
  CHECK(refused([](AttendBody& body) { body.items[0].query_tokens = 17; }));
  CHECK(refused([](AttendBody& body) { body.items[0].query_tokens = 0; }));
  CHECK(refused([](AttendBody& body) { body.query_heads = 0; }));
  CHECK(refused([](AttendBody& body) { body.items.resize(kAttendItemsMax + 1, body.items[0]); }));
  CHECK(refused([](AttendBody& body) {
    for (std::uint64_t i = 0; i <= kAttendRangesMax; ++i) body.items[0].ranges.push_back({6000 + 2 * i, 6001 + 2 * i});
  }));
  CHECK(refused([](AttendBody& body) { body.items[0].query_begin = kSequenceTokensMax + 1; }));
  CHECK(refused([](AttendBody& body) { body.scale = std::numeric_limits<float>::infinity(); }));
  CHECK(refused([](AttendBody& body) { body.query_dtype = DType::kInt8; }));
  CHECK(refused([](AttendBody& body) { body.priority = static_cast<Priority>(3); }));
  CHECK(code_of([] { read_view(write_body(ViewBody{1, false, kSequenceTokensMax + 1, {}})); }) == ErrorCode::kProtocol);
  CHECK(code_of([] { read_unview(write_body(UnviewBody{1, {2, UINT64_MAX}})); }) == ErrorCode::kProtocol);
}

TEST_CASE("bodies that are cut or changed anywhere are refused or read without harm") {
  const auto harmless = [](const Bytes& bytes, auto read) {
    const auto code = code_of([&] { read(bytes); });
    return !code || code == ErrorCode::kProtocol;
  };
  const auto attend = [](const Bytes& bytes) { static_cast<void>(read_attend(bytes)); };
  const auto attended = [](const Bytes& bytes) { static_cast<void>(read_attended(bytes, asked(), kHeadDim)); };
  const auto view = [](const Bytes& bytes) { static_cast<void>(read_view(bytes)); };
  const auto unview = [](const Bytes& bytes) { static_cast<void>(read_unview(bytes)); };
  const auto try_all = [&](const Bytes& bytes, auto read) {
    for (std::size_t n = 0; n < bytes.size(); n += bytes.size() > 256 ? 7 : 1) {
      CHECK(code_of([&] { read(Bytes(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(n))); }) ==
            ErrorCode::kProtocol);
    }
    std::mt19937 random(11);  // NOLINT(bugprone-random-generator-seed)
    for (int i = 0; i < 3000; ++i) {
      Bytes changed = bytes;
      for (int k = 0; k < 3; ++k) changed[random() % std::min<std::size_t>(changed.size(), 200)] = std::byte(random());
      CHECK(harmless(changed, read));
    }
  };
  try_all(write_body(asked()), attend);
  try_all(write_body(answer()), attended);
  try_all(write_body(ViewBody{5, true, 9, {1, 2, 3}}), view);
  try_all(write_body(UnviewBody{5, {9, 2}}), unview);
}

}  // namespace
}  // namespace kvpool::testing
