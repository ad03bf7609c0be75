"""Questions and answers for the speedrun, from the docstrings of Python's standard library, so that nothing is downloaded.

python examples/questions.py DIRECTORY writes DIRECTORY/questions.jsonl, one question with its answer on each line, and
DIRECTORY/chat_template.jinja, which puts a question of the chat page into the same form.
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from corpus import LIBRARY, documented_modules

FORM = "Question: {question}\nAnswer: {answer}"
# The model learns single questions, so the template takes the last message only.
EXAMPLE = "What does textwrap.dedent do?"
SHORTEST_ANSWER = 20  # characters
TEMPLATE = "Question: {{ messages[-1]['content'] }}\nAnswer:"


def main(directory: str) -> None:
    """Write the two files and print how many questions there are."""
    out = Path(directory)
    out.mkdir(parents=True, exist_ok=True)
    answers = dict(pair for _, files in documented_modules() for file in files for pair in questions(file))
    lines = (
        json.dumps({"text": FORM.format(question=question, answer=answer)}) for question, answer in answers.items()
    )
    (out / "questions.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (out / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    print(f"{len(answers):,} questions with answers, for instance: {EXAMPLE} {answers[EXAMPLE]}")


def questions(file: Path) -> Iterator[tuple[str, str]]:
    """(question, the docstring's first paragraph) of each public function, class and method of a file."""
    name = ".".join(file.relative_to(LIBRARY).with_suffix("").parts).removesuffix(".__init__")
    return _questions(ast.parse(file.read_bytes()), name)


def _questions(parent: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            full = f"{name}.{node.name}"
            answer = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            if len(answer) > SHORTEST_ANSWER and answer.endswith("."):
                yield f"What is {full}?" if isinstance(node, ast.ClassDef) else f"What does {full} do?", answer
            if isinstance(node, ast.ClassDef):
                yield from _questions(node, full)


if __name__ == "__main__":
    main(*sys.argv[1:])
