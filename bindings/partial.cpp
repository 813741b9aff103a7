#include "partial.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>

#include "arguments.h"
#include "bind.h"
#include "cpu_tensor.h"
#include "gil.h"
#include "vectors.h"

namespace kvpool::bindings {
namespace {

LseBase base_from(py::handle argument) {
  if (PyLong_Check(argument.ptr()) != 0 && int_text(argument) == "2") return LseBase::kTwo;
  if (PyUnicode_Check(argument.ptr()) != 0 && text_from(argument, "base") == "e") return LseBase::kE;
  throw_argument("base must be 2 or \"e\": whether lse is log2 or the natural logarithm");
}

RowOrder order_from(py::handle argument) {
  const std::string_view text = text_from(argument, "order");
  if (text == "heads_first") return RowOrder::kHeadsFirst;
  if (text == "tokens_first") return RowOrder::kTokensFirst;
  throw_argument("order must be \"heads_first\" (lse is [head, token]) or \"tokens_first\" ([token, head])");
}

std::uint32_t query_tokens_of(const PartialBatch& batch) {
  std::uint32_t tokens = 0;
  for (const PartialBatch::Item& item : batch.items) tokens += item.part.shape().tokens;
  return tokens;
}

std::vector<TokenRange> ranges_from(const py::object& argument) {
  std::vector<TokenRange> ranges;
  for (const auto& [begin, end] : pairs_from(argument, "covers")) {
    ranges.push_back({count_from(begin, "covers"), count_from(end, "covers")});
  }
  return ranges;
}

// The rows of one sequence among those of a batch, in the same order.
std::vector<float> lse_rows(const float* lse, RowOrder order, std::size_t all_tokens, std::size_t begin,
                            const PartialShape& shape) {
  std::vector<float> rows(shape.rows());
  if (order == RowOrder::kTokensFirst) {
    std::copy_n(lse + begin * shape.heads, shape.rows(), rows.begin());
    return rows;
  }
  for (std::size_t head = 0; head < shape.heads; ++head) {
    std::copy_n(lse + head * all_tokens + begin, shape.tokens, rows.begin() + head * shape.tokens);
  }
  return rows;
}

void put_lse_rows(std::span<const float> rows, RowOrder order, std::size_t all_tokens, std::size_t begin,
                  const PartialShape& shape, float* lse) {
  if (order == RowOrder::kTokensFirst) {
    std::copy(rows.begin(), rows.end(), lse + begin * shape.heads);
    return;
  }
  for (std::size_t head = 0; head < shape.heads; ++head) {
    std::copy_n(rows.begin() + head * shape.tokens, shape.tokens, lse + head * all_tokens + begin);
  }
}

// Nothing of Python runs between the moment when the tensors are taken and the last read of them: what it runs could
// give their memory back.
PartialBatch from_lse(const py::object& out_argument, const py::object& lse_argument, py::handle base_argument,
                      py::handle order_argument, const py::object& covers_argument,
                      const py::object& query_tokens_argument) {
  const LseBase base = base_from(base_argument);
  const RowOrder order = order_from(order_argument);
  std::vector<std::vector<TokenRange>> covers;
  for (const py::object& item : items_from(covers_argument, "covers")) covers.push_back(ranges_from(item));
  const std::vector<std::uint32_t> query_tokens = query_tokens_from(query_tokens_argument, covers.size());
  const CpuTensor lse = cpu_tensor_from(lse_argument, "lse", /*writable=*/false);
  const CpuTensor out = cpu_tensor_from(out_argument, "out", /*writable=*/false);
  constexpr std::array<std::int64_t, 3> kAny = {-1, -1, -1};
  check_shape(out, "out", kAny, "[query token, query head, dim]");
  const bool heads_first = order == RowOrder::kHeadsFirst;
  const std::array<std::int64_t, 2> rows = {out.shape[heads_first ? 1 : 0], out.shape[heads_first ? 0 : 1]};
  check_shape(lse, "lse", rows, heads_first ? "[query head, query token]" : "[query token, query head]");
  if (lse.dtype != DType::kFloat32) throw_argument("lse must be float32");
  const auto heads = static_cast<std::uint32_t>(std::min<std::int64_t>(out.shape[1], UINT32_MAX));
  const auto head_dim = static_cast<std::uint32_t>(std::min<std::int64_t>(out.shape[2], UINT32_MAX));
  const auto all_tokens = static_cast<std::size_t>(out.shape[0]);
  std::size_t begin = 0;  // query tokens [begin, begin + query_tokens[i]) are of sequence i
  PartialBatch batch{heads, head_dim, {}};
  for (std::size_t i = 0; i < covers.size(); ++i) {
    const PartialShape shape{query_tokens[i], heads, head_dim};
    if (shape.tokens > all_tokens - begin) break;
    const std::size_t row_bytes = shape.heads * std::size_t{head_dim} * dtype_bytes(out.dtype);
    const std::vector<float> own = lse_rows(reinterpret_cast<const float*>(lse.data), order, all_tokens, begin, shape);
    batch.items.push_back({PartialAttention::from_lse(shape, {out.data + begin * row_bytes, shape.tokens * row_bytes},
                                                      out.dtype, own, base, order, covers[i]),
                           std::nullopt, false});
    begin += shape.tokens;
  }
  if (begin == all_tokens && batch.items.size() == covers.size()) return batch;
  throw_argument("out has " + std::to_string(all_tokens) + " query tokens, which are not those of query_tokens");
}

// REQUIRES: of one sequence.
void check_mergeable(const PartialBatch::Item& a, const PartialBatch::Item& b, std::size_t sequence) {
  if (a.tokens && b.tokens && *a.tokens != *b.tokens) {
    throw_argument("sequence " + std::to_string(sequence) + " has " + std::to_string(*a.tokens) +
                   " tokens in one part and " + std::to_string(*b.tokens) + " in another");
  }
  if (!a.ends_at_queries || b.part.covers().end() <= *a.tokens) return;
  throw_argument("sequence " + std::to_string(sequence) + ": one part covers tokens up to " +
                 std::to_string(b.part.covers().end()) + ", and in another the queries are the last of " +
                 std::to_string(*a.tokens) + " tokens. Pass causal=False to attend for queries that stand behind them");
}

PartialBatch merge(const PartialBatch& self, const py::args& others) {
  std::vector<const PartialBatch*> parts;
  for (const py::handle other : others) {
    if (!py::isinstance<PartialBatch>(other)) {
      throw_type_error("merge takes PartialAttention, not " + type_name(other));
    }
    parts.push_back(other.cast<const PartialBatch*>());
  }
  const GilReleased released;
  PartialBatch merged = self;
  for (const PartialBatch* part : parts) {
    if (part->items.size() != merged.items.size()) {
      throw_argument("one part has " + std::to_string(merged.items.size()) + " sequences, another " +
                     std::to_string(part->items.size()));
    }
    for (std::size_t i = 0; i < merged.items.size(); ++i) {
      PartialBatch::Item& into = merged.items[i];
      const PartialBatch::Item& item = part->items[i];
      check_mergeable(into, item, i);
      check_mergeable(item, into, i);
      into.part.merge(item.part);
      if (!into.tokens) into.tokens = item.tokens;
      into.ends_at_queries = into.ends_at_queries || item.ends_at_queries;
    }
  }
  return merged;
}

// How many tokens each sequence has: from the caller, or from the call that computed a part of it.
std::vector<std::uint64_t> lengths_of(const PartialBatch& batch, const py::object& argument) {
  std::vector<std::uint64_t> lengths;
  if (argument.is_none()) {
    for (std::size_t i = 0; i < batch.items.size(); ++i) {
      if (!batch.items[i].tokens) {
        throw_argument("nothing says how many tokens sequence " + std::to_string(i) + " has: pass tokens=");
      }
      lengths.push_back(*batch.items[i].tokens);
    }
    return lengths;
  }
  for (const py::object& item : items_from(argument, "tokens")) lengths.push_back(count_from(item, "tokens"));
  if (lengths.size() != batch.items.size()) {
    throw_argument("tokens has " + std::to_string(lengths.size()) + " numbers for " +
                   std::to_string(batch.items.size()) + " sequences");
  }
  return lengths;
}

// [query token, query head, dim]. Throws kState unless every sequence is covered.
std::vector<std::byte> finished(const PartialBatch& batch, const std::vector<std::uint64_t>& lengths, DType dtype) {
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < batch.items.size(); ++i) {
    batch.items[i].part.check_covers(lengths[i]);
    bytes += batch.items[i].part.shape().values() * dtype_bytes(dtype);
  }
  std::vector<std::byte> out(bytes);
  std::size_t at = 0;
  for (std::size_t i = 0; i < batch.items.size(); ++i) {
    const PartialAttention& part = batch.items[i].part;
    const std::size_t own = part.shape().values() * dtype_bytes(dtype);
    part.finish(dtype, lengths[i], std::span(out).subspan(at, own));
    at += own;
  }
  return out;
}

// The tensor is taken again to be written: without the GIL another thread may have given its memory back.
void write_to(const py::object& argument, const PartialBatch& batch, const std::vector<std::uint64_t>& lengths,
              const py::object& dtype_argument) {
  const std::array<std::int64_t, 3> dims = {query_tokens_of(batch), batch.heads, batch.head_dim};
  const auto take = [&] {
    CpuTensor out = cpu_tensor_from(argument, "out", /*writable=*/true);
    check_shape(out, "out", dims, "[query token, query head, dim]");
    return out;
  };
  const DType dtype = take().dtype;
  if (!dtype_argument.is_none() && dtype_named(text_from(dtype_argument, "dtype")) != dtype) {
    throw_argument(std::string("out is of ") + dtype_name(dtype) + ": leave dtype out, or pass the same");
  }
  std::vector<std::byte> result;
  {
    const GilReleased released;
    result = finished(batch, lengths, dtype);
  }
  const CpuTensor out = take();
  if (out.bytes != result.size()) throw_argument("out has changed while its content was computed");
  if (!result.empty()) std::memcpy(out.data, result.data(), result.size());
}

py::object finish(const PartialBatch& batch, const py::object& dtype_argument, const py::object& tokens,
                  const py::object& out) {
  const std::vector<std::uint64_t> lengths = lengths_of(batch, tokens);
  if (!out.is_none()) {
    write_to(out, batch, lengths, dtype_argument);
    return out;
  }
  const std::string_view name = dtype_argument.is_none() ? "float32" : text_from(dtype_argument, "dtype");
  const std::optional<DType> dtype = dtype_named(name);
  if (dtype != DType::kFloat32 && dtype != DType::kFloat16 && dtype != DType::kBfloat16) {
    throw_argument("dtype must be \"float32\", \"float16\" or \"bfloat16\"");
  }
  std::vector<std::byte> content;
  {
    const GilReleased released;
    content = finished(batch, lengths, *dtype);
  }
  const char* const numpy = dtype == DType::kFloat32 ? "float32" : dtype == DType::kFloat16 ? "float16" : "uint16";
  py::array result(py::dtype(numpy), std::vector<py::ssize_t>{query_tokens_of(batch), batch.heads, batch.head_dim});
  if (!content.empty()) std::memcpy(result.mutable_data(), content.data(), content.size());
  return result;
}

py::array_t<float> lse(const PartialBatch& batch, py::handle base_argument, py::handle order_argument) {
  const LseBase base = base_from(base_argument);
  const RowOrder order = order_from(order_argument);
  const auto tokens = static_cast<py::ssize_t>(query_tokens_of(batch));
  const auto heads = static_cast<py::ssize_t>(batch.heads);
  const bool heads_first = order == RowOrder::kHeadsFirst;
  py::array_t<float> result(std::vector<py::ssize_t>(heads_first ? std::vector<py::ssize_t>{heads, tokens}
                                                                 : std::vector<py::ssize_t>{tokens, heads}));
  std::size_t begin = 0;
  for (const PartialBatch::Item& item : batch.items) {
    const PartialAttention& part = item.part;
    std::vector<float> rows(part.shape().rows());
    part.lse(base, order, rows);
    put_lse_rows(rows, order, static_cast<std::size_t>(tokens), begin, part.shape(), result.mutable_data());
    begin += part.shape().tokens;
  }
  return result;
}

py::list covers(const PartialBatch& batch) {
  py::list all;
  for (const PartialBatch::Item& item : batch.items) {
    py::list ranges;
    for (const TokenRange& range : item.part.covers().ranges()) ranges.append(py::make_tuple(range.begin, range.end));
    all.append(std::move(ranges));
  }
  return all;
}

py::object kernel(const PartialBatch& batch) {
  std::optional<KernelId> common;
  for (const PartialBatch::Item& item : batch.items) {
    const std::optional<KernelId> own = item.part.kernel();
    if (!own || (common && *common != *own)) return py::none();
    common = own;
  }
  return common ? py::object(py::str(kernel_name(*common))) : py::none();
}

std::string repr(const PartialBatch& batch) {
  std::string text = "<PartialAttention of " + std::to_string(batch.items.size()) + " sequences";
  if (batch.items.size() == 1) {
    text = "<PartialAttention over tokens";
    for (const TokenRange& range : batch.items.front().part.covers().ranges()) {
      text += " [" + std::to_string(range.begin) + ", " + std::to_string(range.end) + ")";
    }
  }
  return text + ">";
}

}  // namespace

std::vector<std::uint32_t> query_tokens_from(const py::object& argument, std::size_t sequences) {
  if (argument.is_none()) return std::vector<std::uint32_t>(sequences, 1);
  std::vector<std::uint32_t> tokens;
  for (const py::object& item : items_from(argument, "query_tokens")) {
    tokens.push_back(static_cast<std::uint32_t>(std::min<std::size_t>(count_from(item, "query_tokens"), UINT32_MAX)));
  }
  if (tokens.size() == sequences) return tokens;
  throw_argument("query_tokens has " + std::to_string(tokens.size()) + " numbers for " + std::to_string(sequences) +
                 " sequences");
}

void bind_partial(py::module_& module) {
  py::class_<PartialBatch>(module, "PartialAttention", R"(Attention over a part of the tokens of some sequences.

What `Pool.attend` computes, and what other kernels computed (`from_lse`), can be merged in any order; `finish` gives the
result once every token is covered exactly once. Parts know which tokens they cover, so a part that is missing or merged
twice is an error and never a wrong result. For every query token and head a part holds the maximum, the sum and the
weighted values in fp32 and base 2 (DistAttention, section 4.2).

Merging follows a fixed tree over the positions of tokens (leaves of 1,024 tokens). As long as sequences are cut at
leaves, results are bit-identical for every cut, every number of threads and every order of merging: `exact` says so.

Immutable and thread-safe. `len()` is the number of sequences.

Attributes:
    covers: For each sequence the ranges of tokens that are covered: a list of (begin, end), ascending.
    exact: Whether one kernel computed everything, and no leaf was cut, so that the bits are the canonical ones.
    kernel: The kernel that computed all of it, such as "avx2/1"; None if there are several, or another library's.)")
      .def("merge", &merge, R"(This part and others, as a new one. Releases the GIL.

Args:
    *others: Parts of the same sequences, in the same order.

Raises:
    ArgumentError: Two of them cover a token, or their sequences, query tokens or heads differ; or one was computed for
        several query tokens at the end of its tokens (``causal=True``), and another one covers tokens behind them.)")
      .def("finish", &finish, py::arg("dtype") = py::none(), py::kw_only(), py::arg("tokens") = py::none(),
           py::arg("out") = py::none(), R"(The result of the attention. Releases the GIL.

Args:
    dtype: "float32", the default, "float16", or "bfloat16", which NumPy has as uint16.
    tokens: How many tokens each sequence has. By default as many as it had when `Pool.attend` was called.
    out: Where to write it, instead of a new array: a contiguous tensor on the CPU, whose type counts.

Returns:
    Array [query token, query head, dim], the query tokens of all sequences one behind the other; or `out`.

Raises:
    StateError: A sequence is not covered exactly: the error has `begin` and `end` of the first gap. Nothing is written.
    ArgumentError: A wrong type or shape; `tokens` is needed, because only other kernels' parts are in it.)")
      .def("lse", &lse, py::kw_only(), py::arg("base"), py::arg("order"),
           R"(The logarithm of the sum of exponentials of each row, over the tokens that are covered.

Args:
    base: 2 or "e". FlashInfer has 2; FlashAttention and torch have "e".
    order: "heads_first" for [query head, query token], "tokens_first" for [query token, query head].

Returns:
    float32 array; -inf in rows that see no token.)")
      .def_static("from_lse", &from_lse, py::arg("out"), py::arg("lse"), py::kw_only(), py::arg("base"),
                  py::arg("order"), py::arg("covers"), py::arg("query_tokens") = py::none(),
                  R"(A part that another kernel has computed, such as an engine's for a chunk of a prompt.

Args:
    out: Its output, normalised: [query token, query head, dim] of float32, float16 or bfloat16 (NumPy: uint16).
    lse: float32, its logarithm of the sum of exponentials of each row; -inf in rows that see no token.
    base: 2 or "e", as in lse(). There is no default, because a wrong one gives a plausible, wrong result.
    order: "heads_first" if lse is [query head, query token], "tokens_first" if it is [query token, query head].
    covers: For each sequence the tokens over which it was computed: a list of (begin, end).
    query_tokens: How many query tokens each sequence has; by default 1.

Raises:
    ArgumentError: Shapes do not fit each other, ranges overlap or are empty, or lse has NaN or +inf.)")
      .def_property_readonly("covers", &covers, "For each sequence the ranges of tokens that are covered.")
      .def_property_readonly(
          "exact",
          [](const PartialBatch& batch) {
            return std::all_of(batch.items.begin(), batch.items.end(),
                               [](const PartialBatch::Item& item) { return item.part.exact(); });
          },
          "Whether the bits are the canonical ones.")
      .def_property_readonly("kernel", &kernel, "The kernel that computed all of it, or None.")
      .def("__len__", [](const PartialBatch& batch) { return batch.items.size(); })
      .def("__repr__", &repr);
}

}  // namespace kvpool::bindings
