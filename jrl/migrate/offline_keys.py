"""The keys of RLlib's configurations that are about data sets, and of the algorithms that learn from them alone."""

from jrl.migrate.key import Key, key, lacking, none

_READER = "files show what they hold: see data.format"
_RAY_DATA = "of Ray Data: jrl reads the files itself, data.placement says where they lie then"
_OWN_DATA = (
    "what makes data of your own is a function () -> EpisodeStore, which data.input names as package.module:name; what "
    "changes each batch is custom.batch"
)
_HERE = "data.input names files of this machine"
_GAPS = "jrl's transformer has no dropout and its optimizer no weight decay"

ALGORITHMS: list[Key] = [
    key("beta", "algo.beta", "of MARWIL and IQL: both multiply the advantage with it"),
    key("bc_logstd_coeff", "algo.ent_coef",
        "the entropy, which differs from the sum of the log deviations by a constant"),
    key("moving_average_sqd_adv_norm_update_rate", "algo.adv_norm_rate"),
    key("moving_average_sqd_adv_norm_start", "algo.adv_norm_start"),
    key("vf_coeff", "algo.vf_coef"),
    key("burnin_len", "replay.burn_in", "with a core"),
    key("bc_iters", "algo.bc_updates", "iterations become updates"),
    key("temperature", "algo.cql_temperature", "of CQL"),
    key("num_actions", "algo.cql_actions"),
    key("min_q_weight", "algo.cql_weight"),
    key("lagrangian", "algo.cql_target_gap", "true: lagrangian_thresh, by default 5, over min_q_weight"),
    key("lagrangian_thresh", "algo.cql_target_gap", "with lagrangian; over min_q_weight, which RLlib's gap contains"),
    key("deterministic_backup", "algo.deterministic_backup"),
    key("expectile", "algo.expectile"),
    key("value_lr", "algo.value_lr"),
    key("target_return", "algo.target_return", "of DT"),
    key("max_ep_len", "algo.step_scale", "numbers of steps are divided by it, not embedded"),
    key("embed_dim", "network.core.size", "of DT, whose core is gtrxl"),
    key("num_layers", "network.core.layers"),
    key("num_heads", "network.core.heads"),
    *none(_GAPS, "embed_pdrop", "resid_pdrop", "attn_pdrop", "num_warmup_steps"),
    *lacking("DT learns actions alone", "loss_coef_obs", "loss_coef_returns_to_go", "use_obs_output",
             "use_return_output"),
    *none("actions are all that DT learns", "loss_coef_actions"),
]  # fmt: skip

DATA: list[Key] = [
    key("input_ input", "data.input",
        "a path, a glob, a list, or a mix {sampler: 0.4, path: 0.6}, an exact split of each batch; sampler: not set. "
        "PolicyServerInput is the section external, of python -m jrl.serve"),
    key("input_config", "data.input, data.format", "path or paths, and format, of input dataset"),
    key("actions_in_input_normalized", "data.actions_in_input_normalized",
        "RLlib takes false where nothing is set, jrl what the data say"),
    key("dataset_num_iters_per_learner", "data.updates_per_iteration, run.report_every",
        "updates of an iteration, of which there is a result row"),
    *none("rows are drawn from all of the data, each as likely as another", "shuffle_buffer_size"),
    *none("returns and targets are made where rows are drawn, by the latest parameters", "postprocess_inputs",
          "prelearner_module_synch_period"),
    *none(_READER, "input_read_episodes", "input_read_sample_batches", "input_read_batch_size",
          "input_compress_columns", "input_spaces_jsonable"),
    key("input_read_method", "data.format", "read_json, read_parquet; " + _OWN_DATA),
    *lacking("columns have RLlib's names; " + _OWN_DATA, "input_read_schema"),
    *lacking(_OWN_DATA, "offline_data_class", "prelearner_class"),
    *lacking(_HERE, "input_filesystem"),
    *none(_HERE, "input_filesystem_kwargs"),
    *none(_RAY_DATA, "input_read_method_kwargs", "materialize_data", "materialize_mapped_data", "map_batches_kwargs",
          "iter_batches_kwargs", "prelearner_buffer_class", "prelearner_buffer_kwargs", "offline_sampling"),
    *none("final observations are read; what was cut bootstraps from them", "ignore_final_observation"),
    *lacking("before a sequence memory is that of an episode's start: replay.burn_in warms it up",
             "prelearner_use_recorded_module_states"),
    key("output", "data.output.path", "a directory; logdir: data in the run directory"),
    key("output_config", "data.output.path, data.output.format", "its path and format, json or parquet"),
    key("output_max_file_size", "data.output.max_file_mb", "bytes become MB"),
    key("output_compress_columns", "data.output.compress", "all arrays of a file are compressed, or none"),
    *none("episodes are written whole, in files of data.output.max_file_mb: docs/data.md",
          "output_max_rows_per_file", "output_write_remaining_data", "output_write_episodes"),
    *none("data.output.format says how, data.output.path where on this machine",
          "output_write_method", "output_write_method_kwargs", "output_filesystem", "output_filesystem_kwargs"),
]  # fmt: skip
