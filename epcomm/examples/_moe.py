"""A small Mixture-of-Experts layer over scikit-learn's handwritten digits, in NumPy, with fixed weights.

Every step gives the same bits however the rows are batched, so that ranks that hold a few rows each can be compared
bit for bit with one process that holds them all:

* the gate is integer arithmetic on the pixels (0 to 16) and one IEEE division;
* an expert sums over its inputs in a written order, one NumPy multiplication and one addition at a time. A matrix
  product would not do: BLAS chooses blocking, and with it the order of the sum, by the shape of the batch.
"""

import numpy as np

NUM_EXPERTS = 8
NUM_TOPK = 2
HIDDEN = 64  # pixels of an image
INNER = 32


def load_images() -> np.ndarray:
    """The 1,797 images, ``[1797, 64]`` uint8 of 0 to 16."""
    from sklearn.datasets import load_digits

    return load_digits().data.astype(np.uint8)


def gate(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two nearest of eight centres of the data ``[num_images, 64]``, the nearer first.

    The centres are found by farthest-point seeding and four rounds of k-means, all in integers.

    Returns
    -------
    topk_idx : ``[num_images, 2]`` int64
    topk_weights : ``[num_images, 2]`` float32
        Each centre is weighted by the share of the *other* one's squared distance; the two sum to one.
    """
    images = images.astype(np.int64)
    seeds = [_nearest(images, _mean(images))]
    while len(seeds) < NUM_EXPERTS:
        seeds.append(images[_distances(images, np.stack(seeds)).min(axis=1).argmax()])
    centres = np.stack(seeds)
    for _ in range(4):
        owner = _distances(images, centres).argmin(axis=1)
        centres = np.stack([_mean(images[owner == e]) if (owner == e).any() else centres[e]
                            for e in range(NUM_EXPERTS)])
    distances = _distances(images, centres)
    topk_idx = np.argsort(distances, axis=1, kind="stable")[:, :NUM_TOPK]
    near = np.take_along_axis(distances, topk_idx, axis=1).astype(np.float32)
    total = near.sum(axis=1, keepdims=True)
    topk_weights = np.where(total > 0, near[:, ::-1] / np.maximum(total, 1), np.float32(0.5)).astype(np.float32)
    return topk_idx, topk_weights


def _mean(images: np.ndarray) -> np.ndarray:
    return (2 * images.sum(axis=0) + len(images)) // (2 * len(images))  # rounded to the nearest integer


def _nearest(images: np.ndarray, centre: np.ndarray) -> np.ndarray:
    return images[_distances(images, centre[None]).argmin()]


def _distances(images: np.ndarray, centres: np.ndarray) -> np.ndarray:
    return ((images[:, None] - centres[None]) ** 2).sum(axis=2)


def expert(number: int, x: np.ndarray) -> np.ndarray:
    """Two layers with seeded weights, ``[rows, 64]`` float32 to the same."""
    rng = np.random.default_rng(number)
    first = rng.standard_normal((HIDDEN, INNER), dtype=np.float32)
    second = rng.standard_normal((INNER, HIDDEN), dtype=np.float32)
    inner = _product(x, first)
    # Not np.maximum: which zero it returns may depend on a value's place in the array.
    return _product(np.where(inner > 0, inner, np.float32(0)), second)


def _product(x: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    total = np.zeros((len(x), matrix.shape[1]), dtype=np.float32)
    for k in range(matrix.shape[0]):
        total += x[:, k, None] * matrix[k]
    return total


def one_process(x: np.ndarray, topk_idx: np.ndarray, topk_weights: np.ndarray) -> np.ndarray:
    """The whole layer without any communication: for each token, its picks in order."""
    total = np.zeros_like(x)
    for k in range(topk_idx.shape[1]):
        for number in range(NUM_EXPERTS):
            rows = topk_idx[:, k] == number
            total[rows] += topk_weights[rows, k, None] * expert(number, x[rows])
    return total


def owned_images(num_images: int, rank: int, num_ranks: int) -> slice:
    """A rank's share of the data."""
    return slice(rank * num_images // num_ranks, (rank + 1) * num_images // num_ranks)
