"""Which modules of a model are its decoder layers, and which of them are meant."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from torch import Tensor, nn

from rsm_torch.checks import as_choice, shown

FINAL, EMBEDDINGS, ALL = "final", "embeddings", "all"
Layer = int | str
Layers = Layer | Callable[[str], bool] | Sequence[Layer]

# What models call the norm behind their last layer.
NORM_NAMES = (
    "norm", "ln_f", "final_layer_norm", "final_layernorm", "norm_f", "final_norm", "ln_out",
)  # fmt: skip


@dataclass(frozen=True)
class Site:
    """A place where states are read.

    Attributes:
        key: what it is called in results: an index for decoder layers (their number for the state
            after the final norm), the module's name for all else.
        name: the module's name in the model.
        module: whose output the state is.
        norm: "pre" for a decoder layer's output, "post" after the final norm, None for others.
        before: whether the state is what the module is given, not what it returns.
    """

    key: Layer
    name: str
    module: nn.Module
    norm: str | None
    before: bool = False


@dataclass(frozen=True)
class Decoder:
    """The part of a model that repeats: `parent` holds `layers` (named `name`) and the `final`
    norm (named `final_name`), None where there is none."""

    parent_name: str
    parent: nn.Module
    name: str
    layers: nn.ModuleList
    final_name: str
    final: nn.Module | None

    def layer(self, index: int) -> Site:
        """The site of a layer; from 0, from the end if negative, the norm if past the last."""
        count = len(self.layers)
        if not -count <= index <= count:
            raise ValueError(
                f"layers: {index} out of range: {self.name} has {count} layers (0 to {count - 1}, "
                f"or from -{count}; {count} is the state after the final norm)"
            )
        if index == count:
            if self.final is None:
                raise ValueError(
                    f"layers: found no final norm beside {self.name}; give the module's name"
                )
            return Site(count, self.final_name, self.final, "post")
        index %= count
        return Site(index, f"{self.name}.{index}", self.layers[index], "pre")


def find_decoder(model: nn.Module) -> Decoder:
    """The decoder layers of a model, wherever it keeps them (`model.layers`, `transformer.h`,
    `gpt_neox.layers`, `model.language_model.layers` …).

    Searched is what the model itself calls its decoder, else all of it. Among the lists of
    modules there that lie in no other list (experts lie in layers), the one as long as the
    config says wins, then the longest.

    Raises:
        ValueError: no list of modules at all; the message names what was found instead.
    """
    scope = model
    if callable(getattr(model, "get_decoder", None)):
        scope = model.get_decoder() or model  # type: ignore[operator]
    lists = list(_outermost_lists(scope)) or list(_outermost_lists(model))
    if not lists:
        found = ", ".join(name for name, _ in model.named_children()) or "no modules in it"
        raise ValueError(
            f"model: found no list of decoder layers in {type(model).__name__} ({found}); "
            "give the names of modules as layers"
        )
    expected = _layers_in_config(model)
    layers = max(lists, key=lambda one: (len(one) == expected, len(one)))
    name = next(name for name, module in model.named_modules() if module is layers)
    parent_name = name.rpartition(".")[0]
    parent = model.get_submodule(parent_name)
    own, final = _final_norm(parent, layers)
    return Decoder(parent_name, parent, name, layers, f"{parent_name}.{own}".lstrip("."), final)


def find_sites(
    model: nn.Module, layers: Layers, norm: str = "pre"
) -> tuple[list[Site], dict[Layer, Layer]]:
    """The places meant by `layers`, each once, and what each may be called besides its key.

    Args:
        layers, norm: as in `capture`.

    Raises:
        TypeError: a layer that is neither an integer nor a name.
        ValueError: one that is not there, none at all, norm="post" for others than the last, or a
            decoder layer that is also another one.
    """
    check_model(model)
    as_choice(norm, "norm", ("pre", "post"))
    sites: dict[Layer, Site] = {}
    called: dict[Layer, Layer] = {}
    for asked in _listed(model, layers):
        site = _site(model, asked)
        if site.norm == "pre":
            _refuse_shared(find_decoder(model), site)
        if norm == "post":
            site = _after_final_norm(model, site)
        sites[site.key] = site
        called |= {asked: site.key, site.key: site.key, site.name: site.key}
        if site.norm == "post":
            called[FINAL] = site.key
    if not sites:
        raise ValueError("layers: no layer named; expected at least one")
    return list(sites.values()), called


def check_model(model: object) -> None:
    """Raises TypeError for what is no model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {shown(model)}")


def _outermost_lists(scope: nn.Module) -> Iterable[nn.ModuleList]:
    for child in scope.children():
        if isinstance(child, nn.ModuleList):
            if len(child):
                yield child
        else:
            yield from _outermost_lists(child)


def _layers_in_config(model: nn.Module) -> int | None:
    config: Any = getattr(model, "config", None)
    if callable(getattr(config, "get_text_config", None)):
        config = config.get_text_config(decoder=True)
    return getattr(config, "num_hidden_layers", None)


def _final_norm(parent: nn.Module, layers: nn.ModuleList) -> tuple[str, nn.Module | None]:
    children = dict(parent.named_children())
    for name in NORM_NAMES:
        if name in children:
            return name, children[name]
    names = list(children)
    behind = names[next(i for i, name in enumerate(names) if children[name] is layers) :]
    for name in behind:
        if "norm" in type(children[name]).__name__.lower():
            return name, children[name]
    return "", None


def _listed(model: nn.Module, layers: Layers) -> list[Layer]:
    """`layers` as a list of integers and names."""
    if callable(layers) and not isinstance(layers, (nn.Module, type)):
        chosen = [name for name, _ in model.named_modules() if name and layers(name)]
        if not chosen:
            some = ", ".join(name for name, _ in list(model.named_modules())[1:6])
            raise ValueError(f"layers: the predicate chose none of the modules ({some} …)")
        return list(chosen)
    out: list[Layer] = []
    for layer in as_layers(layers):
        out += range(len(find_decoder(model).layers)) if layer == ALL else [layer]
    return out


def as_layers(layers: object, name: str = "layers") -> list[Layer]:
    """An index, a name, or several of them, as a list. Raises TypeError."""
    if isinstance(layers, (str, Integral)):
        layers = [layers]
    try:
        items = [layers] if isinstance(layers, (bytes, Tensor)) else list(layers)  # type: ignore[call-overload]
    except TypeError as error:
        raise TypeError(f"{name}: expected indices or names, got {shown(layers)}") from error
    return [_as_layer(item, name) for item in items]


def _as_layer(item: object, name: str) -> Layer:
    if isinstance(item, str):
        return item
    if isinstance(item, bool) or not isinstance(item, Integral):
        raise TypeError(f"{name}: expected indices or names, got {shown(item)}")
    if abs(int(item)) > 2**31:
        raise ValueError(f"{name}: no model has a layer {shown(item)}")
    return int(item)


def _site(model: nn.Module, asked: Layer) -> Site:
    if isinstance(asked, int):
        return find_decoder(model).layer(asked)
    if asked == FINAL:
        decoder = find_decoder(model)
        return decoder.layer(len(decoder.layers))
    if asked == EMBEDDINGS:
        decoder = find_decoder(model)
        return Site(EMBEDDINGS, EMBEDDINGS, decoder.layers[0], None, before=True)
    modules = dict(model.named_modules())
    if asked not in modules or not asked:
        near = difflib.get_close_matches(asked, modules, n=3, cutoff=0.3)
        raise ValueError(
            f"layers: no module {asked!r} in {type(model).__name__}; near it: {', '.join(near)}"
        )
    if any(True for _ in _outermost_lists(model)):  # a layer's name is its index
        decoder = find_decoder(model)
        for site in map(decoder.layer, range(len(decoder.layers) + (decoder.final is not None))):
            if site.module is modules[asked]:
                return site
    return Site(asked, asked, modules[asked], None)


def _refuse_shared(decoder: Decoder, site: Site) -> None:
    same = [at for at, layer in enumerate(decoder.layers) if layer is site.module]
    if len(same) > 1:
        raise ValueError(
            f"layers: {site.key} cannot be told from others, since {', '.join(map(str, same))} of "
            f"{decoder.name} are one module"
        )


def _after_final_norm(model: nn.Module, site: Site) -> Site:
    decoder = find_decoder(model)
    last = len(decoder.layers)
    if site.key not in (last - 1, last):
        raise ValueError(
            f"norm: 'post' is the state after the final norm, which layer {site.key!r} does not "
            f"have; ask for layers=[-1], or name {FINAL!r} among the layers with norm='pre'"
        )
    return decoder.layer(last)
