"""Image encoders against numbers of the original implementation; see octo_extra.py."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from octo_extra import array, assert_close, drawn, error, flattened, golden_shapes, shapes, variables

from vla_rlaif.policies.octo import stems
from vla_rlaif.policies.octo.spec import KeypointSpec, PatchSpec, Stem32Spec, StemSpec
from vla_rlaif.policies.octo.stems import (
    PatchEncoder,
    SmallStem,
    StdConv,
    encoder_module,
    encoder_name,
    normalised_pixels,
)

LOW_CONTRAST = StemSpec(
    features=(32, 64, 96), kernel_sizes=(3,) * 3, strides=(2,) * 3, padding=(1,) * 3, num_features=16
)
FILM = Stem32Spec(
    features=(32, 32), kernel_sizes=(3, 3), strides=(2, 2), padding=(1, 1), num_features=24, use_film=True
)
PATCH = PatchSpec(patch_size=8, num_features=20)
TOLERANCE = 5e-4  # of the low contrast stem, where every epsilon counts


def low_contrast() -> tuple[jax.Array, dict[str, jax.Array]]:
    """The stem's answer, and that of each of its layers."""
    params, pixels = variables("stem_lowcontrast"), array("stem_lowcontrast/img")

    @jax.jit
    def run() -> Any:
        return SmallStem(LOW_CONTRAST).apply(params, pixels, capture_intermediates=True)

    out, state = run()
    layers = flattened(state["intermediates"])
    return out, {name.split("/")[0]: value[0] for name, value in layers.items()}


def test_stem() -> None:
    out, layers = low_contrast()
    assert_close(out, "stem_lowcontrast/out", TOLERANCE)
    for kind in ("StdConv_0", "GroupNorm_0", "GroupNorm_1", "GroupNorm_2", "embedding"):
        assert_close(layers[kind][:1], f"stem_lowcontrast/inter/{kind}", TOLERANCE)
    for kind in ("StdConv_1", "StdConv_2"):  # values up to 50
        assert_close(layers[kind][:1], f"stem_lowcontrast/inter/{kind}", 2e-3)


def test_the_epsilon_of_the_weights_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The golden numbers tell std + 1e-5 from sqrt(variance + 1e-10), which ports to other frameworks use."""

    def inside(kernel: jax.Array) -> jax.Array:
        return (kernel - kernel.mean((0, 1, 2))) / jnp.sqrt(kernel.var((0, 1, 2)) + 1e-10)

    monkeypatch.setattr(stems, "standardised", inside)
    assert error(low_contrast()[0], "stem_lowcontrast/out") > 3 * TOLERANCE


def test_the_epsilon_of_the_groups_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stems, "NORM_EPS", 1e-5)
    assert error(low_contrast()[0], "stem_lowcontrast/out") > 3 * TOLERANCE


def test_film() -> None:
    run = jax.jit(SmallStem(FILM).apply)
    assert_close(run(variables("stem_film"), array("stem_film/img"), array("stem_film/cond_var")), "stem_film/out")


def test_patch_encoder() -> None:
    assert_close(PatchEncoder(PATCH).apply(variables("patch_encoder"), array("patch_encoder/img")), "patch_encoder/out")


def test_parameters_have_upstreams_names_and_shapes() -> None:
    pixels, film = array("stem_film/img"), array("stem_film/cond_var")
    assert shapes(SmallStem(LOW_CONTRAST).init, pixels) == golden_shapes("stem_lowcontrast")
    assert shapes(SmallStem(FILM).init, pixels, film) == golden_shapes("stem_film")
    assert shapes(PatchEncoder(PATCH).init, pixels) == golden_shapes("patch_encoder")


def test_film_is_the_identity_at_the_start() -> None:
    module = stems.FilmConditioning()
    x, film = array("stem_film/out")[:, :1, :1], array("stem_film/cond_var")
    out: Any = module.apply(module.init(jax.random.key(0), x, film), x, film)
    np.testing.assert_array_equal(out, x)


def test_imagenet_normalisation() -> None:
    # Two stacked grey images, red then black: (1 - .485) / .229, and -mean / std for zeros.
    pixels = np.zeros((1, 1, 1, 6), np.uint8)
    pixels[..., 0] = 255
    zeros = [-0.485 / 0.229, -0.456 / 0.224, -0.406 / 0.225]
    want = [(1 - 0.485) / 0.229, *zeros[1:], *zeros]
    np.testing.assert_allclose(normalised_pixels(jnp.asarray(pixels), "imagenet")[0, 0, 0], want, rtol=1e-6)
    with pytest.raises(ValueError, match="4 channels, wanted a multiple of 3"):
        normalised_pixels(jnp.zeros((1, 1, 1, 4)), "imagenet")


def test_strides_kernels_and_padding_come_from_the_spec() -> None:
    # 5 x 5 kernel, stride 3, padding 2 on 6 pixels: (6 + 4 - 5) // 3 + 1 = 2 positions. Compared with flax's own layer.
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 6, 6, 2)), jnp.float32)
    params = drawn(StdConv(4, 5, 3, 2).init, x)["params"]
    used = {"kernel": stems.standardised(params["kernel"]), "bias": params["bias"]}
    got, want = (
        np.asarray(module.apply({"params": weights}, x))
        for module, weights in ((StdConv(4, 5, 3, 2), params), (nn.Conv(4, (5, 5), 3, padding=2), used))
    )
    assert got.shape == (1, 2, 2, 4)
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "size", "message"),
    [
        (StemSpec(), 100, "SmallStem16: the image has 100 x 100 pixels, wanted multiples of 16"),
        (Stem32Spec(), 48, "SmallStem32: the image has 48 x 48 pixels, wanted multiples of 32"),
        (PATCH, 12, "PatchEncoder: the image has 12 x 12 pixels, wanted multiples of 8"),
        (StemSpec(patch_size=8), 16, "patch_size is 8, wanted a multiple of 16"),
        (StemSpec(features=(32, 40, 64, 64)), 16, "40 features do not split into 32 groups"),
        (StemSpec(features=(32, 32)), 16, "features 2, kernel_sizes 4"),
        (StemSpec(use_film=True), 16, "use_film is True but got none"),
    ],
)
def test_mistakes_are_named(spec: Any, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encoder_module(spec).init(jax.random.key(0), jnp.zeros((1, size, size, 3)))


def test_a_conditioning_that_nothing_reads_is_a_mistake() -> None:
    for spec in (PATCH, KeypointSpec()):
        with pytest.raises(ValueError, match="condition"):
            encoder_module(spec).init(jax.random.key(0), jnp.zeros((1, 8, 8, 3)), jnp.zeros((1, 2)))


def test_names() -> None:
    assert [encoder_name(spec) for spec in (StemSpec(), Stem32Spec(), PATCH)] == [
        "SmallStem16_0",
        "SmallStem32_0",
        "PatchEncoder_0",
    ]


@pytest.mark.parametrize("spec", [FILM, PATCH, KeypointSpec(channels=4)])
def test_bfloat16_computes_close_to_float32(spec: Any) -> None:
    """Convolutions in bfloat16 (3 significant digits), parameters in float32."""
    pixels, film = array("stem_film/img"), array("stem_film/cond_var") if spec == FILM else None
    module, half = encoder_module(spec), encoder_module(spec, jnp.bfloat16)
    params = drawn(half.init, pixels, film)
    want, got = (np.asarray(jax.jit(m.apply)(params, pixels, film)) for m in (module, half))
    assert got.dtype == jnp.bfloat16 and want.dtype == np.float32
    difference = np.abs(got.astype(np.float32) - want)
    assert 0 < difference.mean() < 0.02 * np.abs(want).mean()
    declared = jax.tree.leaves(jax.eval_shape(half.init, jax.random.key(0), pixels, film))
    assert {leaf.dtype for leaf in declared} == {np.dtype("float32")}
