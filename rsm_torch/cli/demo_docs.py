"""Streams every machine has: the documentation of Python's own modules, one module each.

An agent that reads a library writes down what it reads, piece by piece: a module's docstring, then
those of its public functions, classes and methods, in the order the module lists them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from rsm_torch.text.items import Item

# Of each module: what is asked, and which object's documentation answers it. Chosen so that the
# modules are safe to import and their answers stand among the first chunks. The last eight are
# spares for a Python without some of the others, and for more than 16 streams.
QUESTIONS = {
    "re": ("Can the replacement given to re.sub be a function?", "sub"),
    "logging": ("How do I log an error together with its exception?", "Logger.exception"),
    "threading": ("Can a thread acquire a reentrant lock it already holds?", "RLock"),
    "statistics": ("Which mean is right for averaging rates such as speeds?", "harmonic_mean"),
    "decimal": ("How do I round a number to a fixed exponent?", "Decimal.quantize"),
    "pathlib": ("How do I recursively list all files matching a pattern?", "Path.rglob"),
    "unittest": ("How do I check that code raises an exception?", "TestCase.assertRaises"),
    "difflib": ("How do I find close matches for a misspelled word?", "get_close_matches"),
    "tarfile": ("How do I read one member as a file object?", "TarFile.extractfile"),
    "socket": ("How is the timeout used when connecting to an address?", "create_connection"),
    "inspect": ("Where do I get the comments that precede a function?", "getcomments"),
    "typing": ("How do I tell the type checker that a value has some type?", "cast"),
    "configparser": ("How do I read settings from a dictionary?", "RawConfigParser.read_dict"),
    "io": ("What does closing a file twice do?", "FileIO.close"),
    "smtplib": ("How do I put the connection into TLS mode?", "SMTP.starttls"),
    "collections": ("How do I list the most common elements?", "Counter.most_common"),
    "datetime": ("How do I make a date from an ISO week number?", "date.fromisocalendar"),
    "doctest": ("How do I run the examples of a text file?", "testfile"),
    "imaplib": ("How do I copy messages to another mailbox?", "IMAP4.copy"),
    "random": ("How do I pick k unique elements without replacement?", "Random.sample"),
    "sqlite3": ("How do I register a function to convert a value?", "register_converter"),
    "subprocess": ("How do I get the output of a command?", "check_output"),
    "argparse": ("How do I show default values in the help?", "ArgumentDefaultsHelpFormatter"),
    "csv": ("How do I find out which dialect a file uses?", "Sniffer.sniff"),
}


def modules() -> Iterator[tuple[str, list[Item]]]:
    """The modules of `QUESTIONS` that this Python has, with their pages."""
    for name in QUESTIONS:
        try:
            items = pages(name)
        except ImportError:  # built without it, as sqlite3 can be
            continue
        if items:  # none when Python runs with -OO
            yield name, items


def pages(name: str) -> list[Item]:
    """A module's documentation, one item per documented object, each text once."""
    module = importlib.import_module(name)
    seen: set[str] = set()
    items: list[Item] = []
    for symbol, text in _documented(module, name):
        if text and text not in seen:
            seen.add(text)
            about = {"symbol": symbol} if symbol else {}
            items.append(Item(f"{symbol or name}: {text}", step=len(items), metadata=about))
    return items


def _documented(module: ModuleType, name: str) -> Iterator[tuple[str, str]]:
    yield "", inspect.cleandoc(module.__doc__ or "")
    listed = getattr(module, "__all__", None) or [n for n in vars(module) if n[0] != "_"]
    for symbol in listed:
        value = vars(module).get(symbol)
        if not (inspect.isclass(value) or inspect.isroutine(value)) or not _home(value, name):
            continue
        yield symbol, _docstring(value)
        if inspect.isclass(value):
            for attribute, member in vars(value).items():
                if attribute[0] != "_":
                    yield f"{symbol}.{attribute}", _docstring(member)


def _home(value: Any, name: str) -> bool:
    """Whether an object is the module's own, not one it imported (C parts begin with "_")."""
    own = getattr(value, "__module__", None) or ""
    return own.split(".")[0].lstrip("_") == name.lstrip("_")


def _docstring(member: Any) -> str:
    """The docstring of a function, class, property or class method; "" for plain values."""
    function = getattr(member, "__func__", member)
    documented = inspect.isroutine(function) or inspect.isclass(function)
    if not documented and not isinstance(function, property):
        return ""
    return inspect.cleandoc(function.__doc__ or "")
