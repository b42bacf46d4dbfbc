# cython: language_level=3
"""Two backends as one: near peers are reached by the first, far ones by the second."""

cimport cython
from libcpp.memory cimport unique_ptr
from libcpp.string cimport string
from libcpp.utility cimport move

from epcomm cimport _cpp
from epcomm._backend cimport Backend as BackendBase

from epcomm import config
from epcomm.errors import InvalidArgumentError


cdef extern from "common/pair.hpp" namespace "epcomm::common" nogil:
    cppclass PairMember:
        pass

    PairMember* as_pair_member(_cpp.Backend* backend)
    unique_ptr[_cpp.Backend] make_pair_backend(const string& name, PairMember* near, PairMember* far,
                                               const string& node_id)


@cython.no_gc_clear
cdef class Backend(BackendBase):
    """One rank's end of a pair of backends, which share the near one's heap.

    Parameters
    ----------
    name : str
        The pair's word.
    near, far : Backend
        Fresh ends of the two backends; the pair keeps and closes them.
    options : dict
        ``node_id`` (default ``EPCOMM_NODE_ID``): ranks that have other ones are far from each other. Other keys are
        left to others.
    """

    cdef readonly BackendBase far
    cdef readonly BackendBase near

    def __dealloc__(self):
        with nogil:  # before the members go, which it uses
            self.impl.reset()

    def __init__(self, name: str, near: BackendBase, far: BackendBase, options: dict | None = None) -> None:
        self.fresh()
        cdef string c_name = name.encode()
        cdef string c_node_id = str((options or {}).get("node_id") or config.get("EPCOMM_NODE_ID") or "").encode()
        cdef PairMember* c_near = as_pair_member(near.impl.get())
        cdef PairMember* c_far = as_pair_member(far.impl.get())
        if c_near == NULL or c_far == NULL:
            raise InvalidArgumentError(f"{near.name} and {far.name} cannot be paired")
        self.near, self.far = near, far
        with nogil:
            self.impl = move(make_pair_backend(c_name, c_near, c_far, c_node_id))
        self.made()

    def plan(self) -> list[dict]:
        """The queue pairs of this rank, one dict each: those to far peers."""
        return self.far.plan()
