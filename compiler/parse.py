"""The first pass: a model description, YAML or a Hugging Face `config.json`, becomes a `ModelSpec`.

Every fault is one DescriptionError with a code and a place in the user's file. Nothing is guessed
and no key is ignored.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError

from mkc.compiler.errors import DescriptionError, Location
from mkc.compiler.limits import MAX_LAYERS, Origin, SpecPath, check_limits, dotted
from mkc.compiler.parse_hf import config_name, parse_config
from mkc.compiler.source import Node, nearest, parse_yaml, quoted, read_text
from mkc.compiler.spec import DenseFfn, ExpertFfn, Frozen, LayerSpec, ModelSpec
from mkc.models import shipped_models

FORMAT_VERSION = 1

_FFN_CLASSES: dict[str, type[DenseFfn] | type[ExpertFfn]] = {
    "dense": DenseFfn,
    "experts": ExpertFfn,
}


def load_model(source: str | Path) -> ModelSpec:
    """Read a model description.

    `source` is the name of a shipped model, the path of a YAML description, a Hugging Face folder
    that holds `config.json`, or the path of such a file. A bare name means the shipped model even
    if a file of that name exists; `./name` is the file.

    Raises DescriptionError (MKC1xx) for whatever is wrong with it.
    """
    models = shipped_models()
    if isinstance(source, str) and source in models:
        path = models[source]
    else:
        path = _find(Path(source), models)
    text = read_text(path)
    if path.suffix == ".json":
        return parse_config(text, str(path), config_name(path))
    return parse_description(text, str(path))


def _find(path: Path, models: Iterable[str]) -> Path:
    """The description's file: `path` itself or the config.json of a folder."""
    try:
        if path.is_dir():
            config = path / "config.json"
            if config.exists():
                return config
            raise DescriptionError(
                "MKC101",
                "the folder has no config.json",
                "give a Hugging Face model folder, or the path of a YAML description",
                Location(str(path)),
            )
        found = path.exists()
    except OSError as error:
        raise DescriptionError(
            "MKC101",
            f"cannot read the description: {error.strerror}",
            location=Location(str(path)),
        ) from error
    if found:
        return path
    close = nearest(str(path), models)
    hint = f"did you mean {close}? " if close else ""
    raise DescriptionError(
        "MKC101",
        f"no file or folder {quoted(str(path))}, and no shipped model of that name",
        f"{hint}shipped models: {', '.join(models)}",
    )


def parse_description(text: str, file: str = "<text>") -> ModelSpec:
    """The model that a YAML description's text says; `file` is how errors name it.

    Raises DescriptionError (MKC103 to MKC129).
    """
    root = parse_yaml(text, file)
    if not isinstance(root.value, dict):
        raise root.error(
            "MKC112", f"a description must be a mapping of keys, not {root.shown()}", _START_HINT
        )
    _check_version(root)
    fields = [name for name in ModelSpec.model_fields if name != "layers"]
    _check_keys(root, (), ("mkc", *fields, "layer_kinds", "layers"))
    kinds: dict[str, LayerSpec] = {}
    layers: list[Node] = []
    values: dict[str, Any] = {}
    for key, node in root.children.items():
        if key == "layer_kinds":
            kinds = _read_layer_kinds(node)
        elif key == "layers":
            layers = _expand_layers(node)
        elif key != "mkc":
            values[key] = _read_field(ModelSpec, key, node, (key,))
    names = [_read_kind_name(node, kinds) for node in layers]
    _check_all_used(root.children["layer_kinds"], names)
    spec = ModelSpec(**values, layers=tuple(kinds[name] for name in names))
    check_limits(spec, _yaml_origin(root, names))
    return spec


_START_HINT = f"a description starts with 'mkc: {FORMAT_VERSION}'"


def _check_version(root: Node) -> None:
    version = root.children.get("mkc")
    if version is None:
        is_hugging_face = "model_type" in root.children
        raise root.error(
            "MKC111",
            "the key 'mkc', the version of the description format, is missing",
            "this looks like a Hugging Face config: give the file the ending .json"
            if is_hugging_face
            else _START_HINT,
        )
    if type(version.value) is not int or version.value != FORMAT_VERSION:
        raise version.error(
            "MKC107",
            f"version {version.shown()} of the description format is not supported",
            f"this mkc reads version {FORMAT_VERSION}",
        )


def _check_keys(node: Node, path: SpecPath, known: Iterable[str]) -> None:
    """A mapping must have exactly the known keys; an unknown one is reported before a missing."""
    known = list(known)
    place = f" in {dotted(path)}" if path else ""
    for key in node.children:
        if key not in known:
            close = nearest(key, known)
            raise node.key_error(
                key,
                "MKC110",
                f"unknown key {quoted(key)}{place}",
                f"did you mean '{close}'?" if close else f"the keys here are {', '.join(known)}",
            )
    for key in known:
        if key not in node.children:
            hint = "it is never guessed: take it from the checkpoint's config"
            raise node.error(
                "MKC111",
                f"missing key '{key}'{place}",
                hint if key == "epsilon" else None,
            )


def _read_object(model: type[Frozen], node: Node, path: SpecPath) -> Any:
    """An instance of a description class from a mapping."""
    _require_mapping(node, path)
    _check_keys(node, path, model.model_fields)
    fields = node.children.items()
    return model(**{key: _read_field(model, key, child, (*path, key)) for key, child in fields})


def _read_field(model: type[Frozen], key: str, node: Node, path: SpecPath) -> Any:
    """The checked value of one field of a description class."""
    annotation = model.model_fields[key].annotation
    if model is LayerSpec and key == "ffn":
        return _read_ffn(node, path)
    if isinstance(annotation, type) and issubclass(annotation, Frozen):
        return _read_object(annotation, node, path)
    try:
        return _field_adapter(model, key).validate_python(node.plain())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        allowed = _allowed(model, key)
        if isinstance(node.value, list) and first["loc"] and isinstance(first["loc"][0], int):
            index = first["loc"][0]
            node, path, allowed = node.value[index], (*path, index), "a whole number"
        raise _value_error(first["type"], allowed, node, path) from error


def _read_ffn(node: Node, path: SpecPath) -> DenseFfn | ExpertFfn:
    """A feed-forward part; `kind` says which class the other keys belong to."""
    _require_mapping(node, path)
    kind = node.children.get("kind")
    if kind is None:
        raise node.error("MKC111", f"missing key 'kind' in {dotted(path)}", _one_of(_FFN_CLASSES))
    if not isinstance(kind.value, str) or kind.value not in _FFN_CLASSES:
        raise _value_error("literal_error", _one_of(_FFN_CLASSES), kind, (*path, "kind"))
    ffn: DenseFfn | ExpertFfn = _read_object(_FFN_CLASSES[kind.value], node, path)
    return ffn


def _read_layer_kinds(node: Node) -> dict[str, LayerSpec]:
    path: SpecPath = ("layer_kinds",)
    _require_mapping(node, path)
    kinds = node.children.items()
    return {name: _read_object(LayerSpec, kind, (*path, name)) for name, kind in kinds}


def _expand_layers(node: Node) -> list[Node]:
    """One node, holding a kind's name, for each layer; repeat blocks are unrolled."""
    expanded: list[Node] = []
    for index, item in enumerate(_require_list(node, ("layers",))):
        path: SpecPath = ("layers", index)
        if not isinstance(item.value, dict):
            expanded.append(item)
            continue
        _check_keys(item, path, ("repeat", "of"))
        repeat = item.children["repeat"]
        if type(repeat.value) is not int or not 1 <= repeat.value <= MAX_LAYERS:
            code = "MKC114" if type(repeat.value) is int else "MKC112"
            raise repeat.error(
                code,
                f"{dotted((*path, 'repeat'))} must be a whole number from 1 to {MAX_LAYERS}, "
                f"not {repeat.shown()}",
            )
        of = item.children["of"]
        block = _require_list(of, (*path, "of"))
        if not block:
            raise of.error("MKC117", f"{dotted((*path, 'of'))} must name at least one layer kind")
        if len(expanded) + repeat.value * len(block) > MAX_LAYERS:
            raise repeat.error("MKC117", f"layers makes more than {MAX_LAYERS} layers")
        expanded += block * repeat.value
    return expanded


def _read_kind_name(node: Node, kinds: dict[str, LayerSpec]) -> str:
    """The kind that an entry of `layers` names."""
    known = ", ".join(kinds)
    if isinstance(node.value, (list, dict)):
        raise node.error(
            "MKC112",
            f"a layer must be the name of a layer kind, not {node.shown()}",
            f"layer_kinds has {known}",
        )
    name = str(node.plain())
    if name not in kinds or not isinstance(node.value, str):
        close = nearest(name, kinds)
        raise node.error(
            "MKC115",
            f"layer_kinds has no {quoted(name)}",
            f"did you mean '{close}'?" if close else f"it has {known or 'no kinds'}",
        )
    return name


def _check_all_used(kinds: Node, names: list[str]) -> None:
    for name in kinds.children:
        if names and name not in names:
            raise kinds.key_error(
                name,
                "MKC116",
                f"no layer is of kind {quoted(name)}",
                "name it under layers, or leave it out",
            )


def _yaml_origin(root: Node, names: list[str]) -> Origin:
    """Fields of layers are found at the layer's kind, all others where the spec has them."""

    def in_file(path: SpecPath) -> SpecPath:
        if len(path) > 2 and path[0] == "layers" and isinstance(path[1], int):
            return ("layer_kinds", names[path[1]], *path[2:])
        return path

    def locate(path: SpecPath) -> Location:
        node = root
        for part in in_file(path):
            if isinstance(part, int) and isinstance(node.value, list):
                node = node.value[part]
            elif isinstance(part, str):
                node = node.children[part]
        return node.location

    return Origin(lambda path: dotted(in_file(path)), locate)


def _require_mapping(node: Node, path: SpecPath) -> None:
    if not isinstance(node.value, dict):
        raise node.error("MKC112", f"{dotted(path)} must be a mapping of keys, not {node.shown()}")


def _require_list(node: Node, path: SpecPath) -> list[Node]:
    if not isinstance(node.value, list):
        raise node.error("MKC112", f"{dotted(path)} must be a list, not {node.shown()}")
    return node.value


@cache
def _field_adapter(model: type[Frozen], key: str) -> TypeAdapter[Any]:
    """Validates one field of a class alone, as strictly as the class does."""
    field = model.model_fields[key]
    annotation: Any = field.annotation
    for constraint in field.metadata:
        annotation = Annotated[annotation, constraint]
    return TypeAdapter(annotation, config=ConfigDict(strict=True))


def _allowed(model: type[Frozen], key: str) -> str:
    """What a field's value may be, in words."""
    field = model.model_fields[key]
    is_constrained = bool(field.metadata)
    return _in_words(field.annotation, is_constrained)


def _in_words(annotation: Any, is_positive: bool) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _in_words(get_args(annotation)[0], True)
    if origin in (Union, types.UnionType):
        parts = (_in_words(part, is_positive) for part in get_args(annotation))
        return " or ".join(parts)
    if origin is Literal:
        return _one_of(get_args(annotation))
    if origin is tuple:
        return "a list of whole numbers"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    above = " above 0" if is_positive else ""
    return "null" if annotation is type(None) else words[annotation] + above


def _one_of(values: Iterable[str]) -> str:
    values = list(values)
    return f"'{values[0]}'" if len(values) == 1 else "one of " + ", ".join(values)


def _value_error(problem: str, allowed: str, node: Node, path: SpecPath) -> DescriptionError:
    """The error for a value that a field refuses; `problem` is pydantic's name of the reason."""
    if problem == "literal_error":
        code, hint = "MKC113", "nothing else is supported yet"
    elif problem in ("greater_than", "finite_number"):
        code, hint = "MKC114", None
    else:
        code, hint = "MKC112", None
    return node.error(code, f"{dotted(path)} must be {allowed}, not {node.shown()}", hint)
