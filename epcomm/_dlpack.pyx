"""DLPack as a consumer: the structs are read here, so that bfloat16, fp8 and GPU memory need no other library."""

from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_SetName

# These names must outlive the capsules that point to them, so they are C literals.
cdef const char* LEGACY = "dltensor"
cdef const char* LEGACY_USED = "used_dltensor"
cdef const char* VERSIONED = "dltensor_versioned"
cdef const char* VERSIONED_USED = "used_dltensor_versioned"

cdef enum:
    READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
    IS_COPIED = 2  # DLPACK_FLAG_BITMASK_IS_COPIED


cdef class Consumed:
    """A tensor taken out of its capsule: its deleter runs once, when the last array over it dies."""

    def __dealloc__(self):
        if self.legacy != NULL and self.legacy.deleter != NULL:
            self.legacy.deleter(self.legacy)
        if self.versioned != NULL and self.versioned.deleter != NULL:
            self.versioned.deleter(self.versioned)

    cdef bint readonly(self):
        """The exporter says so, or writing would only reach a copy. Before 1.0 exporters could not say."""
        return self.versioned != NULL and self.versioned.flags & (READ_ONLY | IS_COPIED) != 0


cdef str device_of(int device_type, int device_id):
    """"cpu" for memory that the host may touch, "cuda:N" for memory of a GPU; TypeError for any other."""
    if device_type in (1, 3, 11):  # kDLCPU, kDLCUDAHost, kDLROCMHost
        return "cpu"
    if device_type in (2, 10, 13):  # kDLCUDA, kDLROCM, kDLCUDAManaged
        return f"cuda:{device_id}"
    raise TypeError(f"DLPack device type {device_type}: expected host (1, 3, 11) or GPU (2, 10, 13) memory")


cdef Consumed export(object obj, object stream):
    """The tensor that ``obj.__dlpack__`` gives, now ours; an exception says what is wrong with it."""
    cdef Consumed taken = Consumed.__new__(Consumed)
    cdef dict arguments = {}
    query = getattr(obj, "__dlpack_device__", None)
    if query is not None:
        device_type, device_id = query()
        # Asked before the export, which may do work. 0 is no stream in DLPack; 1 is the legacy default one.
        if device_of(device_type, device_id) != "cpu" and stream is not None:
            arguments["stream"] = stream or 1
    try:
        capsule = obj.__dlpack__(max_version=(1, 1), **arguments)
    except TypeError:  # an exporter from before 1.0 does not know the keyword
        capsule = obj.__dlpack__(**arguments)
    # Renaming tells the capsule that its tensor has a new owner: whatever happens from here on, `taken` deletes it.
    if PyCapsule_IsValid(capsule, VERSIONED):
        taken.versioned = <DLVersioned*>PyCapsule_GetPointer(capsule, VERSIONED)
        PyCapsule_SetName(capsule, VERSIONED_USED)
        if taken.versioned.major != 1:
            # Nothing but the version and the deleter is known of another ABI.
            raise TypeError(f"DLPack version {taken.versioned.major}.{taken.versioned.minor}: expected 1.x")
        taken.tensor = &taken.versioned.dl_tensor
    elif PyCapsule_IsValid(capsule, LEGACY):
        taken.legacy = <DLManaged*>PyCapsule_GetPointer(capsule, LEGACY)
        PyCapsule_SetName(capsule, LEGACY_USED)
        taken.tensor = &taken.legacy.dl_tensor
    else:
        raise TypeError(f"__dlpack__ gave {capsule!r}: expected an unused capsule named 'dltensor' or "
                        "'dltensor_versioned'")
    if taken.tensor.ndim < 0 or (taken.tensor.ndim > 0 and taken.tensor.shape == NULL):
        raise TypeError(f"DLPack tensor of {taken.tensor.ndim} dimensions without a shape")
    return taken
