"""Lightning's own tests of checkpointing, one by one, and what stands for each with our callback.

Those of 2.6's ``tests/tests_pytorch/checkpointing`` and of its four ``callbacks/test_model_checkpoint_*``.
Each has a test here that checks the same of ours, or a reason why there is nothing to check.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Final

import pytest

_HERE: Final = Path(__file__).parent

RANKING: Final = "test_parity_ranking.py"
NAMES: Final = "test_parity_names.py"
ARGUMENTS: Final = "test_parity_arguments.py"
CALLBACK: Final = "test_callback.py"
BY_HAND: Final = "test_by_hand.py"

COVERED: Final[dict[str, tuple[str, str]]] = {
    # checkpointing/test_checkpoint_callback_frequency.py
    "test_default_checkpoint_freq": (RANKING, "test_epochs_are_saved_when_modelcheckpoint_would"),
    "test_top_k": (RANKING, "test_the_best_stay_beside_the_newest"),
    "test_top_k_ddp": ("test_parity_ranks.py", "test_all_ranks_go_by_what_the_first_has_measured"),
    "test_model_checkpoint_ddp_monitor_none": (
        "test_ranks.py",
        "test_a_run_of_ranks_broken_off_anywhere_ends_as_the_uninterrupted_one",
    ),
    # checkpointing/test_model_checkpoint.py
    "test_model_checkpoint_state_key": (NAMES, "test_another_interval_forgets_nothing"),
    "test_model_checkpoint_score_and_ckpt": (RANKING, "test_attributes_say_what_is_best"),
    "test_model_checkpoint_score_and_ckpt_val_check_interval": (
        RANKING,
        "test_each_validation_of_an_epoch_ranks_its_own_weights",
    ),
    "test_model_checkpoint_to_yaml": (RANKING, "test_attributes_say_what_is_best"),
    "test_pickling": (NAMES, "test_the_callback_can_be_sent_to_another_process"),
    "test_model_checkpoint_format_checkpoint_name": (ARGUMENTS, "test_labels_read_as_modelcheckpoints_files"),
    "test_model_checkpoint_save_last": (RANKING, "test_the_best_stay_beside_the_newest"),
    "test_invalid_top_k": (ARGUMENTS, "test_what_cannot_work_is_refused_at_once"),
    "test_none_monitor_top_k": (ARGUMENTS, "test_what_cannot_work_is_refused_at_once"),
    "test_none_monitor_not_alternating": (RANKING, "test_the_best_stay_beside_the_newest"),
    "test_invalid_every_n_epochs": (ARGUMENTS, "test_what_cannot_work_is_refused_at_once"),
    "test_invalid_every_n_train_steps": (ARGUMENTS, "test_what_cannot_work_is_refused_at_once"),
    "test_none_every_n_train_steps_val_epochs": (
        ARGUMENTS,
        "test_an_epoch_is_the_interval_where_none_is_given",
    ),
    "test_model_checkpoint_save_last_none_monitor": (
        RANKING,
        "test_without_a_metric_the_newest_is_the_best",
    ),
    "test_model_checkpoint_every_n_epochs": (RANKING, "test_epochs_are_saved_when_modelcheckpoint_would"),
    "test_ckpt_every_n_train_steps": (CALLBACK, "test_it_saves_at_its_intervals_and_at_the_end"),
    "test_model_checkpoint_on_exception_fast_dev_run_on_train_batch_start": (
        CALLBACK,
        "test_a_development_run_touches_nothing",
    ),
    "test_model_checkpoint_train_time_interval": (
        CALLBACK,
        "test_nothing_is_saved_while_gradients_are_accumulated",
    ),
    "test_model_checkpoint_topk_zero": (
        RANKING,
        "test_where_nothing_is_to_stay_for_being_good_nothing_is_the_best",
    ),
    "test_model_checkpoint_topk_all": (RANKING, "test_epochs_and_steps_can_be_monitored"),
    "test_ckpt_metric_names": (ARGUMENTS, "test_a_label_is_kept_with_each_checkpoint"),
    "test_default_checkpoint_behavior": (RANKING, "test_without_a_metric_the_newest_is_the_best"),
    "test_model_checkpoint_save_last_checkpoint_contents": (NAMES, "test_every_stage_takes_them"),
    "test_checkpointing_with_nan_as_first": (
        RANKING,
        "test_what_is_not_a_number_is_worse_than_every_number",
    ),
    "test_checkpoint_repeated_strategy": (NAMES, "test_training_goes_on_from_the_best"),
    "test_checkpoint_repeated_strategy_extended": (
        CALLBACK,
        "test_a_finished_run_trains_nothing_and_says_so",
    ),
    "test_configure_model_checkpoint": (CALLBACK, "test_no_other_checkpoint_is_written"),
    "test_val_check_interval_checkpoint_files": (
        RANKING,
        "test_each_validation_of_an_epoch_ranks_its_own_weights",
    ),
    "test_current_score": (RANKING, "test_attributes_say_what_is_best"),
    "test_current_score_when_nan": (RANKING, "test_a_score_that_is_not_a_number_reads_as_the_worst"),
    "test_ckpt_version_after_rerun_new_trainer": (NAMES, "test_a_new_line_forgets_everything"),
    "test_ckpt_version_after_rerun_same_trainer": (
        CALLBACK,
        "test_a_second_fit_of_the_same_trainer_goes_on_in_memory_and_on_the_same_line",
    ),
    "test_ckpt_version_counter_disabled_after_rerun_new_trainer": (ARGUMENTS, "test_what_can_is_taken"),
    "test_model_checkpoint_mode_options": (ARGUMENTS, "test_what_cannot_work_is_refused_at_once"),
    "test_check_val_every_n_epochs_top_k_integration": (
        RANKING,
        "test_epochs_are_saved_when_modelcheckpoint_would",
    ),
    "test_model_checkpoint_saveload_ckpt": (NAMES, "test_of_another_root_only_the_best_path_is_taken_over"),
    "test_resume_training_preserves_old_ckpt_last": (
        NAMES,
        "test_of_another_root_only_the_best_path_is_taken_over",
    ),
    "test_save_last_saves_correct_last_model_path": (NAMES, "test_what_was_best_is_known_after_a_resume"),
    "test_save_last_versioning": (CALLBACK, "test_never_begins_a_new_line_and_leaves_the_old_one_readable"),
    "test_none_monitor_saves_correct_best_model_path": (
        RANKING,
        "test_without_a_metric_the_newest_is_the_best",
    ),
    "test_last_global_step_saved": (NAMES, "test_before_anything_was_saved_there_is_no_best"),
    "test_save_last_every_n_epochs_interaction": (
        RANKING,
        "test_epochs_are_saved_when_modelcheckpoint_would",
    ),
    "test_train_epoch_end_ckpt_with_no_validation": (
        RANKING,
        "test_epochs_are_saved_when_modelcheckpoint_would",
    ),
    "test_resume_and_old_checkpoint_files_remain": (NAMES, "test_what_was_best_is_known_after_a_resume"),
    "test_find_last_checkpoints": (
        NAMES,
        "test_issue_18524_last_resumes_in_a_process_that_knows_nothing_of_the_first",
    ),
    "test_expand_home": (ARGUMENTS, "test_a_home_folder_is_expanded"),
    "test_save_last_without_save_on_train_epoch_and_without_val": (
        RANKING,
        "test_epochs_are_saved_when_modelcheckpoint_would",
    ),
    "test_save_last_only_when_checkpoint_saved": (RANKING, "test_the_best_stay_beside_the_newest"),
    "test_load_with_inf_data_loader": (NAMES, "test_data_without_a_length_can_be_resumed"),
    "test_save_last_cli": (ARGUMENTS, "test_a_command_line_can_give_save_last"),
    # checkpointing/test_trainer_checkpoint.py
    "test_finetuning_with_ckpt_path": (NAMES, "test_training_goes_on_from_the_best"),
    # callbacks/test_model_checkpoint_*.py
    "test_model_checkpoint_every_n_train_steps_with_train_metric_saves_at_step": (
        RANKING,
        "test_a_metric_of_training_ranks_the_step_that_it_was_measured_at",
    ),
    "test_model_checkpoint_time_interval_with_val_metric_defers_until_validation": (
        RANKING,
        "test_time_defers_to_the_first_validation_too",
    ),
    "test_model_checkpoint_defer_until_next_validation_when_val_every_2_epochs": (
        RANKING,
        "test_what_was_due_before_it_was_measured_is_saved_again_once_it_is",
    ),
    "test_checkpoint_defers_with_mid_epoch_validation": (
        RANKING,
        "test_a_step_that_is_due_is_not_ranked_by_what_was_measured_on_another",
    ),
    "test_time_interval_defers_across_epoch_until_first_validation": (
        RANKING,
        "test_time_defers_to_the_first_validation_too",
    ),
    "test_model_checkpoint_every_n_train_steps_with_val_metric_saves_after_val": (
        RANKING,
        "test_a_step_that_is_due_is_not_ranked_by_what_was_measured_on_another",
    ),
}

_EXCEPTION: Final = (
    "a save amid a step would not be one to resume from: what is saved instead has tests of its own"
)

ELSEWHERE: Final[dict[str, str]] = {
    "test_disabled_checkpointing": "without our callback nothing of ours runs",
    "test_model_checkpoint_with_non_string_input": "dirpath must be given: one root for all its starts",
    "test_model_checkpoint_path": "as above: a logger's version is another one at every start",
    "test_model_checkpoint_no_extraneous_invocations": "all ranks save a step together, once: tests/ranks",
    "test_model_checkpoint_file_extension": "a checkpoint is a folder of a fixed layout, and no file",
    "test_model_checkpoint_save_last_as_link_not_local": "the newest is found without a link",
    "test_model_checkpoint_link_checkpoint": "as above",
    "test_model_checkpoint_link_checkpoint_relative_path": "as above",
    "test_model_checkpoint_save_last_link_symlink_bug": "as above",
    "test_invalid_trigger_combination": "intervals may be combined: test_what_can_is_taken",
    "test_hparams_type": "hyper-parameters: test_encodability.py",
    "test_model_checkpoint_on_exception_run_condition_on_validation_start": _EXCEPTION,
    "test_model_checkpoint_on_exception_run_condition_on_train_batch_start": _EXCEPTION,
    "test_model_checkpoint_on_exception_parametrized": _EXCEPTION,
    "test_model_checkpoint_on_exception_in_other_callbacks": _EXCEPTION,
    "test_trainer_save_checkpoint_storage_options": "by hand: test_by_hand.py; storage_options are refused",
    "test_load_legacy_checkpoints": "Lightning's files of earlier releases go Lightning's way: "
    "test_a_lightning_checkpoint_that_is_named_wins",
    "test_legacy_ckpt_threading": "as above",
    "test_resume_legacy_checkpoints": "as above",
    "test_model_torch_save": "torch.save of a Trainer is none of a checkpoint's",
    "test_model_torch_save_ddp_cpu": "as above",
    "test_model_torch_save_ddp_cuda": "as above",
    "test_model_checkpoint_manual_opt": "weights from before the step, out of a module's `saved_models`: "
    "ours are those after it, as an exact resume needs them",
    "test_model_checkpoint_manual_opt_warning": "as above",
}


@cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse((_HERE / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("scenario", sorted(COVERED))
def test_what_lightning_checks_is_checked_of_ours(scenario: str) -> None:
    file, name = COVERED[scenario]
    assert name in names_in(file)


def test_each_scenario_stands_once_and_each_reason_names_what_exists() -> None:
    assert not COVERED.keys() & ELSEWHERE.keys()
    for reason in ELSEWHERE.values():
        for word in reason.replace(";", " ").replace(":", " ").split():
            if word.startswith("test_") and word.endswith(".py"):
                assert (_HERE / word).exists(), word
