"""Task files -> `Task` records, and `Task` <-> JSON.

JSON is the form in which a task travels and is stored. `load_tasks` makes the tasks of a generated
set (`arith:train?n=100&seed=1`, see `prorl.tasks.generated`) or reads a file or folder (`rows.py`:
JSON Lines, JSON, Parquet, what `datasets` saves) in one of the formats of `formats/`, told apart by
the first row's keys. Whatever is wrong with a file or a row ends in one TaskError that names the
file, the line, what was found, what was expected and how to mend it; with `skip_bad` such rows are
left out and counted. It does not ask an env whether it can use the task: that is `Env.check`.

| format | keys of its rows | env |
|---|---|---|
| prorl | task_id, env, prompt [, data, data_source] | the row's |
| humaneval | task_id, prompt, entry_point, test | code |
| swebench | instance_id, problem_statement, test_patch, FAIL_TO_PASS | swe |
| verl | prompt, reward_model {ground_truth} [, data_source, extra_info] | math; code for tests |
| nemo_gym | responses_create_params, expected_answer or verifier_metadata | math; code for tests |
| apps | question, input_output (APPS, TACO) | code |
| livecodebench | question_content, public_test_cases | code |
| contest | description, public_tests, official_tests or examples | code |
| choices, arc, gpqa, sciq | question, choices or options, answer; their own | stem |
| gsm8k | question, answer (`... <<48/2=24>>24 ... #### 72`) | math |
| answers | prompt, question or problem; answer, expected_answer ... | math |
"""

from prorl.task_json import task_from_json, task_to_json
from prorl.tasks.files import TaskSet, load_tasks, read_tasks

__all__ = ["TaskSet", "load_tasks", "read_tasks", "task_from_json", "task_to_json"]
