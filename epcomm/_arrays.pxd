# A resolved array, for the modules that read its fields without going through Python.

from libc.stdint cimport int64_t, uintptr_t


cdef class Memory:
    cdef readonly uintptr_t ptr
    cdef readonly Py_ssize_t nbytes
    cdef readonly bint readonly
    cdef readonly object owner
    cdef int64_t _pad[2]


cdef class Array:
    cdef readonly uintptr_t ptr
    cdef readonly int64_t size
    cdef readonly int ndim
    cdef readonly int itemsize
    cdef readonly bint readonly
    cdef readonly bint requires_grad
    cdef readonly tuple shape
    cdef readonly tuple strides
    cdef readonly str dtype
    cdef readonly str device
    cdef readonly str kind
    cdef readonly object owner
    cdef readonly object stream
    cdef object _hold

    cpdef bint contiguous(self)
    cpdef bint rows_contiguous(self)
    cpdef bint aligned(self)


cpdef Array view(object obj, str name, object stream=*)
cpdef object empty(object shape, str dtype, Array like, bint zero=*)
cpdef object wrap(uintptr_t ptr, object shape, str dtype, Array like, object owner, bint readonly=*, object strides=*)
cpdef Array kind_of(Array array)
cpdef object as_numpy(Array array)
cpdef str framework_of(Array like)
