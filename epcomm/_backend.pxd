# The face that every backend's module shows; subclasses make the C++ object.

from libcpp.memory cimport unique_ptr

from epcomm cimport _cpp


cdef class Backend:
    cdef unique_ptr[_cpp.Backend] impl

    cdef int fresh(self) except -1
    cdef int made(self) except -1
    cdef _cpp.HostTransport* transport(self) except NULL
