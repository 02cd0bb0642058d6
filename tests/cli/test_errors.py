"""What counts as an error of memory."""

from __future__ import annotations

import pytest

from dave_vit.errors import is_out_of_memory


@pytest.mark.parametrize(
    "said",
    [
        "CUDA out of memory. Tried to allocate 2 GiB",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`",
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes",
    ],
)
def test_libraries_that_say_in_other_words_that_memory_does_not_suffice(said):
    assert is_out_of_memory(RuntimeError(said))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
