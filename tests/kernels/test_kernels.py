"""Every kernel against a loop over features, and what every kernel must be: symmetric, positive, batched, smooth."""

import math

import pytest
import torch
from torch import Tensor

from deepwishart.gram import Gram, gram_of_features
from deepwishart.kernels import KERNELS, Kernel, RationalQuadratic, ScaledKernel, make_kernel
from tests.distributions.instances import generator
from tests.reference.kernels import KERNELS as REFERENCE
from tests.reference.kernels import rational_quadratic

NAMES = sorted(KERNELS)
EXPRESSIONS = [*NAMES, "squared-exponential + linear", "matern-5/2 * linear + arc-cosine-1"]
HEIGHT, LENGTHSCALE = 1.3, 0.7


def features(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator(seed))


def with_parameters(kernel: Kernel) -> Kernel:
    with torch.no_grad():
        for module in kernel.modules():
            if isinstance(module, ScaledKernel):
                module.log_height.fill_(math.log(HEIGHT))
                module.log_lengthscale.fill_(math.log(LENGTHSCALE))
    return kernel


def dense(kernel: Kernel, X: Tensor) -> Tensor:
    """The whole kernel matrix of some points."""
    return kernel(gram_of_features(X, X)).ii.detach()


@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_a_loop_over_features(name: str) -> None:
    """K(G) is the same kernel on the features behind G, block by block."""
    Z, X = features(4, 3), features(5, 3, seed=1)
    K = with_parameters(make_kernel(name))(gram_of_features(Z, X))
    for block, rows, columns in ((K.ii, Z, Z), (K.it, Z, X)):
        for i, z in enumerate(rows.tolist()):
            for j, x in enumerate(columns.tolist()):
                expected = REFERENCE[name](z, x, HEIGHT, LENGTHSCALE)
                assert block[i, j].item() == pytest.approx(expected, rel=1e-6, abs=1e-7)
    for j, x in enumerate(X.tolist()):
        assert K.tt[j].item() == pytest.approx(REFERENCE[name](x, x, HEIGHT, LENGTHSCALE), rel=1e-7)


def test_the_exponent_of_the_rational_quadratic() -> None:
    kernel = with_parameters(make_kernel("rational-quadratic"))
    assert isinstance(kernel, RationalQuadratic)
    with torch.no_grad():
        kernel.log_exponent.fill_(math.log(2.5))
    X = features(4, 3)
    expected = [[rational_quadratic(x, y, HEIGHT, LENGTHSCALE, 2.5) for y in X.tolist()] for x in X.tolist()]
    torch.testing.assert_close(dense(kernel, X), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("name", EXPRESSIONS)
@pytest.mark.parametrize("seed", range(5))
def test_positive_semi_definite_on_random_inputs(name: str, seed: int) -> None:
    X = features(30, 1 + seed, seed=seed)
    K = dense(make_kernel(name), X)
    torch.testing.assert_close(K, K.mT, rtol=0, atol=1e-7)
    assert torch.linalg.eigvalsh(K)[0] > -1e-14 * K.diagonal().sum()


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_rotating_the_features_changes_nothing(name: str) -> None:
    X = features(6, 4)
    Q = torch.linalg.qr(features(4, 4, seed=1))[0]
    torch.testing.assert_close(dense(make_kernel(name), X @ Q), dense(make_kernel(name), X), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_a_point_has_its_own_variance(name: str) -> None:
    """The diagonal of ii, a point in it met again in it, and its entry in tt are one number."""
    X = features(5, 3)
    K = make_kernel(name)(gram_of_features(X, X))
    torch.testing.assert_close(K.diagonal, K.tt, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(K.it.diagonal(), K.tt, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_samples_and_replicas_batch(name: str) -> None:
    """Samples in front, replicas next, each replica with its own parameters."""
    S, R = 3, 2
    kernel = make_kernel(name, torch.Size((R,)))
    with torch.no_grad():
        for parameter in kernel.parameters():
            parameter.copy_(torch.tensor([0.3, -0.2]))
    Z, X = features(S, R, 4, 3), features(S, R, 5, 3, seed=1)
    K = kernel(gram_of_features(Z, X))
    assert (K.ii.shape, K.it.shape, K.tt.shape) == ((S, R, 4, 4), (S, R, 4, 5), (S, R, 5))
    single = make_kernel(name)
    for r in range(R):
        with torch.no_grad():
            for ours, theirs in zip(single.parameters(), kernel.parameters(), strict=True):
                ours.copy_(theirs[r])
        alone = single(gram_of_features(Z[1, r], X[1, r]))
        for block, expected in zip(K, alone, strict=True):
            torch.testing.assert_close(block[1, r], expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_gradients_are_finite_where_points_coincide(name: str, dtype: torch.dtype) -> None:
    """Duplicates, a zero vector, opposite vectors: distances of zero and angles of zero and π."""
    X = torch.tensor([[1.0, 2.0], [1.0, 2.0], [0.0, 0.0], [-1.0, -2.0], [2.0, 4.0]], dtype=dtype, requires_grad=True)
    kernel = make_kernel(name, dtype=dtype)
    K = kernel(gram_of_features(X, X))
    assert all(block.isfinite().all() for block in K)
    grads = torch.autograd.grad(sum(block.sum() for block in K), [X, *kernel.parameters()], allow_unused=True)
    assert all(grad is None or grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_gradcheck(name: str) -> None:
    kernel = make_kernel(name)
    X = features(3, 2).requires_grad_()

    def blocks(Z: Tensor) -> Gram:
        return kernel(gram_of_features(Z, features(2, 2, seed=5)))

    assert torch.autograd.gradcheck(blocks, (X,))


def test_only_stationary_kernels_learn_a_lengthscale() -> None:
    learned = {name: {key for key, _ in make_kernel(name).named_parameters()} for name in NAMES}
    assert learned["squared-exponential"] == {"log_height", "log_lengthscale"}
    assert learned["rational-quadratic"] == {"log_height", "log_lengthscale", "log_exponent"}
    assert learned["linear"] == {"log_height"}
    at_the_inputs = make_kernel("squared-exponential", learn_lengthscale=False)
    assert {key for key, _ in at_the_inputs.named_parameters()} == {"log_height"}
    second = make_kernel("squared-exponential + matern-5/2", learn_lengthscale=False)
    assert {key for key, _ in second.named_parameters()} == {
        "kernels.0.log_height",
        "kernels.1.log_height",
        "kernels.1.log_lengthscale",
    }


def test_operators_and_names_agree() -> None:
    X = features(5, 2)
    a, b, c = (make_kernel(name) for name in ("matern-5/2", "linear", "arc-cosine-1"))
    torch.testing.assert_close(dense(a * b + c, X), dense(make_kernel("matern-5/2 * linear + arc-cosine-1"), X))
    torch.testing.assert_close(dense(a + b, X), dense(a, X) + dense(b, X))


@pytest.mark.parametrize("name", ["rbf", "", "linear + ", "linear - matern-5/2"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"kernel must be one of squared-exponential, .* there is no '"):
        make_kernel(name)


def test_gram_of_features_and_division() -> None:
    Z, X = features(2, 4, 3), features(2, 5, 3, seed=1)
    gram = gram_of_features(Z, X)
    torch.testing.assert_close(gram.ii, Z @ Z.mT / 3)
    torch.testing.assert_close(gram.it, Z @ X.mT / 3)
    torch.testing.assert_close(gram.tt, (X @ X.mT).diagonal(dim1=-2, dim2=-1) / 3)
    for half, whole in zip(gram / 2, gram, strict=True):
        torch.testing.assert_close(half, whole / 2)
