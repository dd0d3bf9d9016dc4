"""Generated kernels run in Triton's interpreter here too; Triton has to be imported for it before anything else is."""

from tests.codegen import conftest  # noqa: F401
