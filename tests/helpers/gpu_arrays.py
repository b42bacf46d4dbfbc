"""GPU arrays for tests: made from NumPy arrays, lying in memory as asked, and brought back."""

import importlib

import numpy as np

from helpers import arrays

FRAMEWORKS = ("cupy", "torch")
# "odd": at an address that no item but bytes is aligned to; only bytes can be cut there, so it is a view of them.
FORMS = {
    "cupy": ("plain", "rows", "columns", "reversed", "fortran", "offset"),
    "torch": ("plain", "rows", "columns", "fortran", "offset"),
}


def why_not(framework):
    """Why the framework has no GPU here, or None."""
    try:
        module = importlib.import_module(framework)
    except ImportError as error:
        return f"{framework}: {error}"
    if framework == "torch":
        return None if module.cuda.is_available() else "torch: no CUDA"
    try:
        return None if module.cuda.runtime.getDeviceCount() else "cupy: no GPU"
    except module.cuda.runtime.CUDARuntimeError as error:
        return f"cupy: {error}"


def put(array, framework, form="plain"):
    """A NumPy array's values on GPU 0."""
    if array is None:
        return None
    if form == "offset":  # one item further than memory begins: no 16-byte pieces
        flat = _plain(np.concatenate([array.reshape(-1)[:1], array.reshape(-1)]), framework) if array.size else None
        return _plain(array, framework) if flat is None else flat[1:].reshape(array.shape)
    if form == "plain" or array.size == 0:
        return _plain(array, framework)
    if form == "rows":
        return _plain(np.repeat(array, 2, axis=0), framework)[::2]
    if form == "columns":
        return _plain(np.repeat(array, 3, axis=-1), framework)[..., 1::3]
    if form == "reversed":
        every = tuple(slice(None, None, -1) for _ in array.shape)
        return _plain(np.ascontiguousarray(array[every]), framework)[every]
    if form == "fortran":
        return _plain(np.ascontiguousarray(array.T), framework).T
    raise ValueError(form)


def _plain(array, framework):
    array = np.ascontiguousarray(array)
    if framework == "torch":
        return arrays.to_kind(array.copy(), "torch").cuda()
    import cupy

    raw = cupy.asarray(array.view(np.uint8) if array.ndim and array.size else array.reshape(-1)[:0].view(np.uint8))
    if not array.size:
        return cupy.empty(array.shape, array.dtype)
    return raw.view(array.dtype).reshape(array.shape)


def get(thing):
    """A result's values as NumPy."""
    if thing is None or isinstance(thing, (int, np.ndarray)):
        return thing
    if type(thing).__module__.partition(".")[0] == "torch":
        return arrays.to_numpy(thing.cpu())
    import cupy

    thing = cupy.ascontiguousarray(thing)
    if not thing.size:
        return np.empty(thing.shape, thing.dtype)
    return thing.reshape(-1).view(np.uint8).get().view(thing.dtype).reshape(thing.shape)


def is_kind(thing, framework):
    """Whether a result is an array of the framework on GPU 0."""
    module = importlib.import_module(framework)
    if framework == "torch":
        return isinstance(thing, module.Tensor) and thing.is_cuda and thing.device.index == 0
    return isinstance(thing, module.ndarray) and thing.device.id == 0
