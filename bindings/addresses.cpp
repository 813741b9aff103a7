// Block numbers of addresses, for callers that index a tensor with them.
#include <pybind11/numpy.h>

#include <cstddef>
#include <cstdint>

#include "bind.h"
#include "kvpool/base/address.h"
#include "kvpool/base/medium.h"
#include "vectors.h"

namespace kvpool::bindings {
namespace {

namespace py = pybind11;

// The block numbers of a one-dimensional array of uint64 whose addresses are all of one pool and one medium, as they
// mostly are. None for everything else: kvpool.types.addresses tells what is wrong with it, if anything is.
py::object block_ids_if_alike(py::handle given) {
  if (!py::isinstance<py::array_t<std::uint64_t>>(given)) return py::none();
  if (py::reinterpret_borrow<py::array>(given).ndim() != 1) return py::none();
  const Vector<Address> addresses = addresses_from(given);
  const std::size_t n = addresses.size();
  py::array_t<std::int64_t> ids(static_cast<py::ssize_t>(n));
  if (n == 0) return ids;
  const Address* const from = addresses.data();
  if (!is_medium(medium_bits_of(from[0]))) return py::none();
  std::int64_t* const to = ids.mutable_data();
  Address unlike = 0;
  for (std::size_t i = 0; i < n; ++i) {
    unlike |= (from[i] ^ from[0]) >> kMediumShift;
    to[i] = block_of(from[i]);
  }
  if (unlike != 0) return py::none();
  return ids;
}

}  // namespace

void bind_addresses(py::module_& module) { module.def("_block_ids_if_alike", &block_ids_if_alike); }

}  // namespace kvpool::bindings
