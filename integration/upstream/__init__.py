"""The engines' own tests, natively and with the package: what passes natively must pass with the package too.

    python -m integration.upstream vllm --device cpu --out results.json
    python -m integration.upstream sglang --source CHECKOUT --device cuda --out results.json

| file            | idea                                                                             |
|-----------------|----------------------------------------------------------------------------------|
| sources.py      | where an engine's tests come from, and which of them concern the package          |
| hub.py          | small models, made here, under the names that the tests download                  |
| environment.py  | what the tests' engines need on this device                                      |
| outcomes.py     | a pytest plugin that writes each test's outcome as soon as the outcome is known   |
| run.py          | one subject: the tests of every file, in a process of their own                   |
| comparison.py   | the two subjects side by side, and the differences that the contract wants        |
| expected.json   | these differences, each with its reason                                           |

Nothing that belongs to an engine is kept in this repository. Tests and models lie in a folder that git ignores.
"""
