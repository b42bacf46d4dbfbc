# DLPack as a consumer, ABI 1.x and the unversioned one before it.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from *:
    """
    typedef struct { int32_t device_type, device_id; } EpcommDLDevice;
    typedef struct { uint8_t code, bits; uint16_t lanes; } EpcommDLDataType;
    typedef struct {
        void *data;
        EpcommDLDevice device;
        int32_t ndim;
        EpcommDLDataType dtype;
        int64_t *shape, *strides;
        uint64_t byte_offset;
    } EpcommDLTensor;
    typedef struct EpcommDLManaged {
        EpcommDLTensor dl_tensor;
        void *manager_ctx;
        void (*deleter)(struct EpcommDLManaged *);
    } EpcommDLManaged;
    typedef struct EpcommDLVersioned {
        uint32_t major, minor;
        void *manager_ctx;
        void (*deleter)(struct EpcommDLVersioned *);
        uint64_t flags;
        EpcommDLTensor dl_tensor;
    } EpcommDLVersioned;
    """
    ctypedef struct DLDevice "EpcommDLDevice":
        int32_t device_type
        int32_t device_id

    ctypedef struct DLDataType "EpcommDLDataType":
        uint8_t code
        uint8_t bits
        uint16_t lanes

    ctypedef struct DLTensor "EpcommDLTensor":
        void* data
        DLDevice device
        int32_t ndim
        DLDataType dtype
        int64_t* shape
        int64_t* strides
        uint64_t byte_offset

    ctypedef struct DLManaged "EpcommDLManaged":
        DLTensor dl_tensor
        void (*deleter)(DLManaged*) noexcept

    ctypedef struct DLVersioned "EpcommDLVersioned":
        uint32_t major
        uint32_t minor
        void (*deleter)(DLVersioned*) noexcept
        uint64_t flags
        DLTensor dl_tensor


cdef class Consumed:
    cdef DLTensor* tensor
    cdef DLManaged* legacy
    cdef DLVersioned* versioned

    cdef bint readonly(self)


cdef Consumed export(object obj, object stream)
cdef str device_of(int device_type, int device_id)
