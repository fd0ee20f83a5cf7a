"""The configuration: defaults, order of precedence, and what every mistake is told.

Not exercised: what the fields do.
"""

import math
import re
from pathlib import Path

import pytest
import yaml

from tests.alone import loaded_by
from vapo_megatron.config import (
    ConfigError,
    SourceConfig,
    VapoConfig,
    describe_fields,
    load,
    load_config,
    recipe_names,
)
from vapo_megatron.config.peers import PEERS

ROOT = Path(__file__).parents[2]


def rejected(*overrides, path=()):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_one_override_is_not_taken_for_its_letters():
    with pytest.raises(
        ConfigError, match=r"overrides='seed=1' must be a list .* write \['seed=1'\]"
    ):
        load_config("vapo", "seed=1")


def test_later_files_and_then_overrides_win(tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("seed: 1\nalgorithm: {gamma: 0.9, clip_low: 0.1, clip_high: 0.3}\n")
    second.write_text("algorithm:\n  clip_low: 0.15\n  clip_high: 0.4\n")
    config = load_config([first, str(second)], ["algorithm.clip_high=0.5", "reward.num_workers=3"])
    a = config.algorithm
    assert (config.seed, a.gamma, a.clip_low, a.clip_high) == (1, 0.9, 0.15, 0.5)
    assert config.reward.num_workers == 3 and load_config(first).algorithm.clip_high == 0.3


def test_an_empty_file_changes_nothing(tmp_path):
    (tmp_path / "a.yaml").write_text("# nothing\n")
    assert load_config(tmp_path / "a.yaml") == load_config([]) == VapoConfig()


def test_overrides_are_read_as_yaml():
    config = load_config(
        [],
        [
            "optimizer.actor_learning_rate=1e-6",  # YAML 1.1 reads it as text
            "rollout.stop_token_ids=[1, 2]",
            "rollout.kv_cache_bytes=null",
            "rollout.enforce_eager=true",
            "model.hf_path=/a=b",
            "algorithm.lambda_critic=same_as_actor",
            "algorithm.lambda_actor=0.95",
            "data.train_path=",
            "logging.run_dir=2026-13-45",  # which YAML takes for a date, and refuses
        ],
    )
    assert config.optimizer.actor_learning_rate == 1e-6
    assert config.rollout.stop_token_ids == [1, 2] and config.rollout.kv_cache_bytes is None
    assert config.rollout.enforce_eager is True and config.model.hf_path == "/a=b"
    assert (config.algorithm.lambda_critic, config.algorithm.lambda_actor) == (
        "same_as_actor",
        0.95,
    )
    assert config.data.train_path is None and config.logging.run_dir == "2026-13-45"


def test_the_resolved_configuration_reads_back(tmp_path):
    config = load_config(
        [], ["algorithm.lambda_actor=0.95", "rollout.stop_token_ids=[3]", "seed=7"]
    )
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "config.yaml") == config
    assert set(yaml.safe_load(config.to_yaml())) == set(VapoConfig.model_fields)


def test_the_configuration_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        load_config([]).algorithm.gamma = 0.5


def test_unknown_names_get_the_nearest_one():
    for override, message in [
        ("algorithm.gama=1", "unknown field algorithm.gama; did you mean algorithm.gamma?"),
        ("algoritm.gamma=1", "unknown field algoritm.gamma; did you mean algorithm.gamma?"),
        (
            "use_critic=1",
            "unknown field use_critic; valid names: seed, model, parallel, rollout, data, ",
        ),
        ("clip_high=0.3", "unknown field clip_high; did you mean algorithm.clip_high?"),
        ("reward.gamma=1", "unknown field reward.gamma; did you mean algorithm.gamma?"),
        ("max_respons_tokens=9", "unknown field max_respons_tokens; did you mean rollout.max_resp"),
        ("algoritm.gama=1", "unknown field algoritm; did you mean algorithm?"),
        ("algorithm=3", "algorithm is a section, found 3; set algorithm.FIELD=VALUE"),
        ("foo", "override 'foo' must have the form section.field=value, for example "),
        ("=3", "override '=3' must have the form section.field=value"),
        ("algorithm..gamma=1", "override 'algorithm..gamma=1' must have the form section.field=v"),
        ("algorithm.=1", "override 'algorithm.=1' must have the form section.field=value"),
    ]:
        assert rejected(override).startswith(message), (override, message)


TOLD_BY_PEERS = {
    "num_generations=8": "TRL's num_generations is algorithm.group_size here",
    "algorithm.num_generations=8": "TRL's num_generations is algorithm.group_size here",
    "+trainer.nnodes=1": "verl's trainer.nnodes is parallel.world_size here, of all nodes",
    "rollout.n=4": "verl's actor_rollout_ref.rollout.n is algorithm.group_size here",
    "model.path=x": "verl's actor_rollout_ref.model.path is model.hf_path here",
    "data.train_batch_size=3": (
        "verl's data.train_batch_size is algorithm.responses_per_step here, which counts "
        "responses: prompts times algorithm.group_size"
    ),
    "loss_fn.ratio_clip_max=1": "NeMo-RL's loss_fn.ratio_clip_max is algorithm.clip_high here",
}


def test_names_of_other_trainers_are_told_as_ours():
    for override, told in TOLD_BY_PEERS.items():
        name = override.partition("=")[0]
        assert rejected(override) == f"unknown field {name}; {told}"
    assert "verl" not in rejected("foo.path=1") and "verl" not in rejected("foo.enable=1")


def test_other_trainers_names_lead_to_fields_that_there_are():
    ours = {"seed", *load._all_fields()}
    for trainer, names in PEERS.items():
        for name, text in names.items():
            fields = re.split("[,:]| and | / ", text)[:1] + re.findall(
                r"[a-z]+(?:\.[a-z_]+)+", text
            )
            assert set(fields) <= ours, (trainer, name, text)
            told = rejected(f"{name}=1")
            assert told.startswith(f"unknown field {name}; {trainer}'s {name} is "), told


def test_a_wrong_value_is_one_line_with_field_value_rule_and_default():
    for override, rule, default in [
        ("algorithm.lambda_critic='x'", "a valid number or 'same_as_actor'", "1.0"),
        ("algorithm.lambda_actor=[1]", "a valid number or 'adaptive'", "adaptive"),
        ("algorithm.gamma=1.5", "less than or equal to 1", "1.0"),
        ("algorithm.group_size=0", "greater than or equal to 1", "16"),
        ("algorithm.mini_batch_size=True", "a number", "512"),
        ("algorithm.mini_batch_size=1.5", "a valid integer", "512"),
        ("algorithm.kl_coef=-0.1", "greater than or equal to 0", "0.0"),
        ("algorithm.sampler_correction='ice'", "'none', 'tis' or 'icepop'", "none"),
        ("algorithm.sampler_icepop_low=1.5", "less than or equal to 1", "0.5"),
        ("algorithm.sampler_icepop_high=0.5", "greater than or equal to 1", "5.0"),
        ("algorithm.sampler_tis_cap=0", "greater than 0", "2.0"),
        ("algorithm.loss_aggregation='tokens'", "'token', 'sample' or 'constant'", "token"),
        ("algorithm.lambda_critic=True", "a number", "1.0"),
        ("reward.correct=nan", "a finite number", "1.0"),
        ("optimizer.actor_learning_rate=inf", "a finite number", "1.0e-06"),
        ("optimizer.actor_method='sgd'", "'adamw', 'dion' or 'muon'", "adamw"),
        ("optimizer.matrix_rank_fraction=0", "greater than 0", "0.25"),
        ("optimizer.matrix_rank_fraction=1.5", "less than or equal to 1", "0.25"),
        ("optimizer.matrix_momentum=1", "less than 1", "0.95"),
        ("rollout.temperature=0", "greater than 0", "1.0"),
        ("rollout.stop_token_ids=5", "a valid list", "[]"),
        ("rollout.dtype='fp8'", "'bfloat16' or 'float32'", "null"),
        ("data.shuffle='perhaps'", "a valid boolean", "true"),
        ("model.hf_path=5", "a valid string", "null"),
        ("seed=-1", "greater than or equal to 0", "0"),
        ("seed={'x': 1}", "a valid integer", "0"),
        (f"seed={2**63}", "below 2**63", "0"),
        ("rollout.stop_token_ids=[True]", "numbers", "[]"),
        ("reward.from_score=[False, True]", "numbers", "null"),
        ("model.lora.targets=[]", "a list of at least 1 item", "null"),
    ]:
        name, value = override.split("=", 1)
        text = {"nan": ".nan", "inf": ".inf"}.get(value, value)
        message = rejected(f"{name}={text}")
        assert "\n" not in message, (override, rule, default)
        assert message.startswith(f"{name}={value} must be {rule}"), (override, rule, default)
        assert f"leave it out for the default {default} (" in message, (override, rule, default)


@pytest.mark.parametrize("word", ["off", "'off'", "OFF"])
def test_a_bare_off_is_the_word_where_it_is_a_choice(word):
    assert load_config([], [f"logging.progress={word}"]).logging.progress == "off"
    assert load_config([], [f"data.shuffle={word.strip(chr(39))}"]).data.shuffle is False


def test_every_wrong_field_gets_a_line_and_lists_name_the_place():
    lines = rejected("algorithm.gamma=2", "rollout.stop_token_ids=[1,a]", "seed=x").splitlines()
    starts = ["seed='x'", "rollout.stop_token_ids[1]='a'", "algorithm.gamma=2"]
    assert [line.split(" must be")[0] for line in lines] == starts


REFUSED = """
algorithm.lambda_actor=1.5
    lambda_actor=1.5 | [0, 1] | or adaptive
algorithm.lambda_critic=-1
    lambda_critic=-1 | [0, 1] | or same_as_actor
algorithm.advantage_estimator=grpo
    value_pretraining_steps=50 | must be 0 | =grpo | set algorithm.value_pretraining
algorithm.advantage_estimator=dr_grpo  algorithm.value_pretraining_steps=0  algorithm.group_size=1
    group_size=1 | at least 2 | dr_grpo | raise it
algorithm.advantage_estimator=grpo  algorithm.value_pretraining_steps=0
  algorithm.positive_lm_weight=advantage
    positive_lm_weight=advantage needs a critic | =grpo | set positive_lm_weight=one
algorithm.value_pretraining_patience=5
    patience=5 | needs algorithm.stage=value_pretraining | set it to null
algorithm.stage=value_pretraining  algorithm.lambda_critic=0.95
    Monte-Carlo | lambda_critic=1, found gae and 0.95
algorithm.stage=value_pretraining  algorithm.advantage_estimator=grpo
    advantage_estimator=gae | found grpo and 1.0
algorithm.stage=value_pretraining  algorithm.value_pretraining_patience=50
    value_pretraining_steps=50 must exceed | patience (50) | raise it
algorithm.stage=value_pretraining  algorithm.value_pretraining_steps=0
    value_pretraining_steps=0 must exceed | stage=value_pretraining | raise it
model.value_head_bias=mean_return  algorithm.advantage_estimator=grpo
  algorithm.value_pretraining_steps=0
    value_head_bias=mean_return needs a critic | =grpo | set value_head_bias=none
model.critic_checkpoint=runs/x  algorithm.advantage_estimator=grpo
  algorithm.value_pretraining_steps=0
    critic_checkpoint=runs/x needs a critic | =grpo | set critic_checkpoint=null
algorithm.group_size=7
    responses_per_step=8192 | divisible by group_size=7
algorithm.mini_batch_size=500
    responses_per_step=8192 | mini_batch_size=500
parallel.world_size=1024
    mini_batch_size=512 | at least the data-parallel size 1024 | lower
parallel.world_size=6  parallel.tensor_model_parallel_size=4
    world_size=6 | tensor_model_parallel_size(4) | = 4 | change one
parallel.world_size=4  parallel.context_parallel_size=3
    world_size=4 | context_parallel_size(3) | = 3 | change one
parallel.sequence_parallel=true
    sequence_parallel=true | found 1 | =false
parallel.virtual_pipeline_model_parallel_size=2
    virtual_pipeline_model_parallel_size=2 | found 1 | null
parallel.world_size=2  parallel.pipeline_model_parallel_size=2
  parallel.virtual_pipeline_model_parallel_size=2  parallel.batch_p2p_comm=true
    batch_p2p_comm=true | parallel_size=2 | set batch_p2p_comm=null, or virtual
parallel.overlap_param_gather=true
    overlap_param_gather=true | overlap_grad
parallel.world_size=4  rollout.tensor_model_parallel_size=3
    parallel.world_size=4 | rollout.tensor_model_parallel_size=3
model.fp8=hybrid  model.dtype=float32
    fp8=hybrid | dtype=bfloat16 | fp8=null
model.fp8=e4m3  model.layer_spec=local
    fp8=e4m3 | layer_spec=local | auto
model.fp8=hybrid  optimizer.actor_method=dion
    fp8=hybrid | null | optimizer.actor_method=dion | adamw
model.lora.targets=[q_proj]
    model.lora.targets=['q_proj'] needs model.lora.rank, found null | targets=null
model.lora.path=adapters
    model.lora.path=adapters needs model.lora.rank, found null | path=null
rollout.adapter_sync=adapter
    rollout.adapter_sync=adapter needs adapters of the actor | rank=null | adapter_sync=merged
rollout.adapter_sync=adapter  model.lora.rank=8  model.lora.roles=[critic]
    rollout.adapter_sync=adapter | rank=8 | roles=['critic'] | adapter_sync=merged
model.lora.rank=8  optimizer.critic_method=muon
    optimizer.critic_method=muon must be adamw | model.lora.rank=8 | rank=null
model.lora.rank=8  model.lora.path=adapters  model.lora.roles=[critic]
    model.lora.path=adapters | roles=['critic'] | path=null
model.lora.rank=8  algorithm.freeze_critic_attention=true
    algorithm.freeze_critic_attention=true must be false | model.lora.targets
model.lora.rank=8  model.lora.roles=[critic]  algorithm.advantage_estimator=grpo
  algorithm.value_pretraining_steps=0
    model.lora.roles=['critic'] has none of this run's models, actor, | rank=null
model.lora.rank=8  model.critic_hf_path=other
    model.critic_hf_path=other must be null | share_base=true | share_base=false
model.layer_spec=transformer_engine  model.dtype=float32
    layer_spec=transformer_engine | found float32 | layer_spec=local
algorithm.dynamic_sampling=true  algorithm.group_size=1
    dynamic_sampling=true | found 1 | raise group_size | dynamic_sampling=false
algorithm.dynamic_sampling=true  model.reward_hf_path=rm
    dynamic_sampling=true | model.reward_hf_path=rm | dynamic_sampling=false
reward.verifier=reward_model
    reward.verifier, which is reward_model, needs model.reward_hf_path, found null; set it
reward.verifier=taste  reward.verifiers.taste.use=reward_model
    reward.verifier, which is reward_model, needs model.reward_hf_path, found null; set it
reward.verifiers.reward_model.use=reward_model
    reward.verifiers.reward_model, which is reward_model, needs model.reward_hf_path
rollout.top_p=0.7
    rollout.top_p=0.7 | must be 1 | evaluation.top_p
rollout.top_k=50
    rollout.top_k=50 | must be -1 | evaluation.top_k
reward.overlong_buffer_tokens=30000
    overlong_buffer_tokens=30000 | max_response_tokens=20480 | lower it
algorithm.value_bound=0.9
    value_bound is no longer a field | algorithm.value_range=[low, high] | in its place
algorithm.value_range=[-1,0.9]
    value_range=[-1.0, 0.9] | must contain the rewards, -1 to 1: | widen it
algorithm.value_range=[-1,1]  reward.overlong_buffer_tokens=9
    value_range=[-1.0, 1.0] | the rewards, -2 to 1:
algorithm.value_range=[1,-1]
    value_range=[1.0, -1.0] | low below high | null
algorithm.value_range=[-1,0,1]
    value_range=[-1.0, 0.0, 1.0] | must be [low, high]
algorithm.policy_loss=dis  algorithm.sampler_correction=tis
    sampler_correction=tis | must be none | policy_loss=dis | policy_loss=ppo_clip
algorithm.policy_loss=none  algorithm.sampler_correction=tis
    sampler_correction=tis | must be none | policy_loss=none, which has no ratio; set it, or
algorithm.policy_loss=none  algorithm.positive_lm_coef=0
    policy_loss=none needs algorithm.positive_lm_coef above 0, found 0 | set positive_lm_coef=1
algorithm.policy_loss=none  rollout.behaviour=sampler
    behaviour=sampler | must be recomputed | policy_loss=none, which has no ratio
algorithm.advantage_estimator=none  algorithm.value_pretraining_steps=0
    advantage_estimator=none needs algorithm.policy_loss=none, found ppo_clip | =gae
algorithm.advantage_estimator=none  algorithm.value_pretraining_steps=0
  algorithm.policy_loss=none  algorithm.advantage_whitening=true
    advantage_whitening=true needs advantages | advantage_estimator=none | =false
data.response_column=r
    algorithm.policy_loss=ppo_clip must be none with data.response_column=r: | response_column=null
data.response_column=r  algorithm.policy_loss=none
    algorithm.advantage_estimator=gae must be none with data.response_column=r: | no critic
data.response_column=r  algorithm.policy_loss=none  algorithm.advantage_estimator=none
    algorithm.value_pretraining_steps=50 must be 0 with data.response_column=r: | no critic
{sft}  algorithm.group_size=16
    algorithm.group_size=16 must be 1 with data.response_column=r: | a row has one response
{sft}  algorithm.dynamic_sampling=true
    algorithm.dynamic_sampling=true must be false with data.response_column=r: | sampled
{sft}  algorithm.kl_coef=0.1
    algorithm.kl_coef=0.1 must be 0 with data.response_column=r: | that the policy has sampled
{sft}  rollout.placement=disaggregated  rollout.num_processes=1
    rollout.placement=disaggregated must be colocated with data.response_column=r: | nothing is
{sft}  rollout.lag=1
    rollout.lag=1 needs rollout.placement=disaggregated
{sft}  rollout.carry_over_groups=1
    rollout.carry_over_groups=1 must be 0 with data.response_column=r: | nothing is sampled
{sft}  model.reward_hf_path=rm
    model.reward_hf_path=rm must be null with data.response_column=r: | nothing is judged
{sft}  environment.use=a:B  reward.verifier=environment
    data.response_column=r must not be combined with an environment | environment.use=null
{sft}  environment.tools=[python]
    data.response_column=r must not be combined with an environment | environment.tools=[]
{sft}  algorithm.stage=value_pretraining
    stage=value_pretraining | needs advantage_estimator=gae | found none
{sft}  model.value_head_bias=mean_return
    value_head_bias=mean_return needs a critic | advantage_estimator=none does not train
{sft}  model.critic_checkpoint=runs/x
    critic_checkpoint=runs/x needs a critic | advantage_estimator=none does not train
{sft}  algorithm.positive_lm_weight=advantage
    positive_lm_weight=advantage needs a critic | set positive_lm_weight=one
{sft}  data.critic_prompt_column=hint
    critic_prompt_column needs a critic | advantage_estimator=none does not train
data.critic_prompt_column=hint  algorithm.advantage_estimator=grpo
  algorithm.value_pretraining_steps=0
    critic_prompt_column needs a critic | advantage_estimator=grpo | null
data.critic_prompt_column=hint  data.sources.math.path=math.jsonl
    critic_prompt_column=hint is of data.train_path | each source's
data.sources.math.weight=2
    data.sources.math.path is required; set it to a file of
data.sources.math.path=math.jsonl  data.train_path=a.jsonl
    train_path=a.jsonl must not be combined with data.sources
data.sources.math.path=math.jsonl  data.sources.math.wieght=2
    math.wieght; did you mean data.sources.math.weight?
data.sources.math.path=math.jsonl  data.sources.code=code.jsonl
    data.sources.code is a section, found 'code.jsonl';
data.sources.math.path=math.jsonl  data.sources={1: {path: b}}
    data.sources: the name 1 must be text; quote it
data.sources.math.path=math.jsonl  data.sources={'a b': {path: b}}
    data.sources.a b: a name must have letters, dig
data.sources.math.path=math.jsonl  data.sources.math.weight=-1
    data.sources.math.weight=-1 must be greater than or
data.sources.math.path=math.jsonl  data.sources.math.weight=x
    math.weight='x' must be a valid number; change it, or
data.sources.math.path=math.jsonl  data.sources.math.weight=0
    after 0 steps the weights of math are all 0; one must
data.sources.math.path=math.jsonl  data.sources.math.schedule=[[4, 1], [9, 0]]
    data.sources: after 9 steps the weights of math are all 0;
    one must be above 0 in every step of the run: raise a weight, or a factor of its schedule
data.sources.math.path=math.jsonl  data.sources.math.schedule=[[0, x]]
    math.schedule[0][1]='x' must be a valid number
data.sources.math.path=math.jsonl  data.sources.math.schedule=[[0]]
    math.schedule=[[0.0]] must be a list of [steps
data.sources.math.path=math.jsonl  data.sources.math.schedule=[[5, 1], [5, 0]]
    each with more steps than the one bef
data.sources.math.path=math.jsonl  data.sources.math.schedule=[[0, -1]]
    none below 0, each with more
data.sources.math.path=math.jsonl  data.sources.math.verifier=mth
    data.sources.math.verifier=mth must be one of code, environment, exact, hybrid, judge, math,
    pairwise,
    reward_model; change it, or add it to reward.verifiers
evaluation.path=t.jsonl  evaluation.sources.aime.path=a.jsonl
    evaluation.path=t.jsonl must not be combined with evaluation.sources, which has aime; set
evaluation.sources.aime.verifier=math
    evaluation.sources.aime.path is required; set i
evaluation.sources.aime.weight=2
    unknown field evaluation.sources.aime.weight; valid
evaluation.sources.aime={path: a, verifier: hybrid}
    evaluation.sources.aime.verifier=hybrid needs reward.hybrid
data.sources.math.path=math.jsonl  data.sources.math.verifier=reward_model
    data.sources.math.verifier, which is reward_model, needs model.reward_hf_path, found null
reward.verifier=hybrid
    reward.hybrid=[] must name the verifiers that reward.verifier=
data.sources.math.path=math.jsonl  data.sources.math.verifier=hybrid
    data.sources.math.verifier=hybrid needs reward.hybrid, the verifiers that it chooses am
reward.hybrid=[math, magic]
    once at most, found magic; change it
reward.hybrid=[math, code, math]
    once at most, found math; change it
reward.hybrid=[hybrid]
    once at most, found hybrid; change it
model.reward_hf_path=rm  reward.hybrid=[reward_model, math]
    reward_model, a reward model, accepts every row, so nothing would be left for the others
reward.hybrid=[math, reward_model]
    reward.hybrid's reward_model, which is reward_model, needs model.reward_hf_path, found
reward.verifiers.hybrid.use=math
    reward.verifiers.hybrid has no options; set reward.hy
reward.verifiers={a b: {use: math}}
    reward.verifiers.a b: a name must have letters, dig
reward.scales.math.correct=1
    reward.scales.math needs reward.from_score, the range of
reward.from_score=[-1, 2]  reward.scales.mth.correct=1
    reward.scales.mth must be the scale of one of math
reward.from_score=[-1, 2]  reward.scales.hybrid.correct=1
    reward.scales.hybrid must be the scale of one o
reward.from_score=[-1, 2]  reward.scales.math.corect=1
    did you mean reward.scales.math.correct?
reward.from_score=[-1, 2]  reward.scales.math.mean=1
    scales.math must have mean and std together; set bo
reward.from_score=[-1, 2]  reward.scales.math.high=1
    scales.math must have low and high together; set bo
reward.from_score=[-1, 2]  reward.scales.math={mean: 0, std: 1, low: 0, high: 1}
    reward.scales.math must have mean and std, or low and high; remove a pair
reward.from_score=[-1, 2]  reward.scales.math={mean: 0, std: 0}
    math.std=0 must be greater than 0; change
reward.from_score=[-1, 2]  reward.scales.math={low: 1, high: 1}
    math.low=1 must be below reward.scales.ma
reward.from_score=[-1, 2]  reward.scales.math.correct=2.5
    math.correct=2.5 must lie in reward.from_score=
reward.from_score=[-1, 2]  reward.scales.math.incorrect=-2
    math.incorrect=-2 must lie in reward.from_scor
reward.from_score=[-1, 2]  reward.scales.math.truncated_correct=3
    math.truncated_correct=3 must lie in reward.from_score=[-1, 2], the range of rewards; ch
reward.from_score=[-1, 2]  reward.scales.math={mean: 0, std: 0.1}  algorithm.value_range=[-1, 1.9]
    algorithm.value_range=[-1.0, 1.9] must contain the rewards, -1 to 2: otherwise no value
rollout.num_processes=1
    num_processes=1 needs rollout.placement=disaggregated, found
rollout.lag=2
    rollout.lag=2 needs rollout.placement=disaggregated, found colocated
rollout.placement=disaggregated
    needs rollout.num_processes of at least 1, found 0; set how many
rollout.placement=disaggregated  rollout.num_processes=2  rollout.tensor_model_parallel_size=4
    rollout.num_processes=2 must be divisible by rollout.tensor_model_parallel_size=4
rollout.placement=disaggregated  rollout.num_processes=2  algorithm.dynamic_sampling=true
    dynamic_sampling=true, whose rounds depend on
rollout.placement=disaggregated  rollout.num_processes=2  model.reward_hf_path=rm
    model.reward_hf_path=rm: rollout workers keep responses with
rollout.placement=disaggregated  rollout.num_processes=2  rollout.lag=1
  rollout.max_logprob_difference=0.1
    rollout.lag=1 must not be combined with rollout.max_logprob_difference=0.1: with a lag
parallel.world_size=4  parallel.expert_model_parallel_size=8
    expert_model_parallel_size=8 must divide the 4 ranks of a pipeline stage | change one of them
algorithm.router_replay=r2  rollout.behaviour=sampler
    algorithm.router_replay=r2 replays the pass that | rollout.behaviour=sampler | router_replay=off
algorithm.router_replay=r2  algorithm.policy_loss=none
    algorithm.router_replay=r2 replays the pass that | algorithm.policy_loss=none
algorithm.router_replay=r3  algorithm.policy_loss=none
    algorithm.router_replay=r3 replays the pass that | algorithm.policy_loss=none
rollout.vllm_args={"enable_return_routed_experts":true}
    enable_return_routed_experts=True is set by the trainer | use algorithm.router_replay
algorithm.router_replay=r3  rollout.vllm_args={"enable_prefix_caching":false}
    enable_prefix_caching must be on with algorithm.router_replay=r3 | remove it, or
rollout.compare_routes_every=-1
    rollout.compare_routes_every
rollout.vllm_args={"moe_backend":"flashinfer_cutlass"}
    rollout.vllm_args: moe_backend=flashinfer_cutlass must not be set | triton | remove it
rollout.vllm_args={"enable_expert_parallel":true}
    enable_expert_parallel=True is set by the trainer | use rollout.expert_parallel
rollout.behaviour=sampler  algorithm.sampler_correction=tis
    behaviour=sampler must not be combined with algorithm.sampler_correction=tis, which
rollout.lag=-1
    rollout.lag
algorithm.responses_per_step=32  algorithm.group_size=16  rollout.carry_over_groups=3
    rollout.carry_over_groups=3 must not exceed the groups of a step, responses_per_step /
    group_size = 2: more could
algorithm.responses_per_step=32  algorithm.group_size=16  algorithm.mini_batch_size=32
  rollout.carry_over_groups=2  algorithm.dynamic_sampling=true
    dynamic_sampling=true, whose rounds depend
algorithm.responses_per_step=32  algorithm.group_size=16  algorithm.mini_batch_size=32
  rollout.carry_over_groups=2  model.reward_hf_path=rm
    model.reward_hf_path=rm: groups wait with their
algorithm.responses_per_step=32  algorithm.group_size=16  algorithm.mini_batch_size=32
  rollout.carry_over_groups=2  rollout.max_logprob_difference=0.1
    carry_over_groups=2 must not be combined with rollout.max_logprob_difference=0.1: older
rollout.max_lag=0
    rollout.max_lag
rollout.carried_cache=keep
    rollout.carried_cache is no longer a field: groups that go on are always recomputed
algorithm.responses_per_step=32  algorithm.group_size=16  algorithm.mini_batch_size=32
  rollout.carry_over_groups=2  rollout.shared_queue=true
    shared_queue=true must not be combined with rollout.carry_over_groups=2, which cuts
algorithm.responses_per_step=32  algorithm.group_size=16  rollout.shared_queue=true
  rollout.max_num_sequences=8
    needs rollout.max_num_sequences=8 of at least algorithm.group_size=16: engines take whole
environment.use=a:B  environment.tools=[python]
    environment.use=a:B must not be combined with environment.tools=['python'] | set use=null
environment.options.a=1
    environment.options={'a': 1} needs environment.use or environment.tools
reward.verifier=environment
    reward.verifier=environment needs environment.use | found null | set it
environment.use=a:B
    environment.use=a:B needs a verifier to be chosen | reward.verifier=environment
environment.use=a:B  reward.verifier=environment  rollout.carry_over_groups=1
    rollout.carry_over_groups must be 0 with an environment | found 1 | set it to 0
"""
"""Overrides at the margin, two blanks between them; below, the parts of the error's line.

{sft} stands for those of SFT.
"""
SFT = (
    "data.response_column=r  algorithm.policy_loss=none  algorithm.advantage_estimator=none  "
    "algorithm.value_pretraining_steps=0  algorithm.group_size=1"
)


def refused():
    """(overrides, parts) of each."""
    for case in re.split(r"\n(?=\S)", REFUSED.strip()):
        overrides, parts = case.replace("{sft}", SFT).split("\n    ", 1)
        yield re.split(r"\s{2,}", overrides), re.split(r" \| |\n +", parts)


@pytest.mark.parametrize(("overrides", "parts"), refused())
def test_fields_that_do_not_fit_together(overrides, parts):
    message = rejected(*overrides)
    assert "\n" not in message and not [part for part in parts if part not in message], message


MATH = "data.sources.math.path=math.jsonl"


def test_a_hybrid_of_scaled_verifiers_reads_back(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "model: {reward_hf_path: rm}\n"
        "reward:\n  verifier: hybrid\n  hybrid: [tests, math, taste]\n  from_score: [-3, 3]\n"
        "  verifiers: {tests: {use: code}, taste: {use: reward_model}}\n"
        "  scales:\n    math: {correct: 1, incorrect: -1}\n    taste: {mean: 1.5, std: 2}\n"
        "    'near:Near': {low: 0, high: 1}\n"
    )
    with pytest.raises(ConfigError, match="near:Near must be the scale of one of math, exact"):
        load_config(tmp_path / "a.yaml")
    # Of a class in place of hybrid, and a bound that is the range's end.
    given = ["reward.verifier=near:Near", "reward.scales.taste.std=4"]
    given.append("algorithm.value_range=[-3, 3]")
    scales = load_config(tmp_path / "a.yaml", given).reward.scales
    assert (scales["taste"].mean, scales["taste"].std) == (1.5, 4)
    assert scales["math"].correct == 1 and scales["near:Near"].high == 1


def test_sources_read_back_and_an_override_changes_one(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "data:\n  sources:\n    math: {path: m.jsonl, schedule: [[0, 1], [9, 0.5]]}\n"
        "    code: {path: c.jsonl, verifier: tests}\n"
        "reward: {verifiers: {tests: {use: code}}}\n"
    )
    config = load_config(tmp_path / "a.yaml", ["data.sources.math.weight=3"])
    assert config.data.sources["math"].weight_after(9) == 1.5
    assert config.data.sources["code"].verifier == "tests"
    # Weights of 0 after the last step are no mistake.
    end = config.algorithm.num_steps
    load_config([], [MATH, f"data.sources.math.schedule=[[0, 1], [{end}, 0]]"])
    (tmp_path / "b.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "b.yaml") == config


def test_layouts_that_fit_are_accepted():
    config = load_config(
        [],
        [
            "parallel.world_size=16",
            "parallel.tensor_model_parallel_size=2",
            "parallel.pipeline_model_parallel_size=2",
            "parallel.sequence_parallel=true",
            "parallel.virtual_pipeline_model_parallel_size=2",
            "rollout.tensor_model_parallel_size=4",
        ],
    )
    assert (config.parallel.model_parallel_size, config.parallel.data_parallel_size) == (4, 4)


@pytest.mark.parametrize(
    ("vpp", "batched"), [("null", "true"), ("1", "true"), ("null", "false"), ("2", "false")]
)
def test_sends_between_stages_are_the_users_choice_elsewhere(vpp, batched):
    overrides = [
        "parallel.world_size=2",
        "parallel.pipeline_model_parallel_size=2",
        f"parallel.virtual_pipeline_model_parallel_size={vpp}",
        f"parallel.batch_p2p_comm={batched}",
    ]
    assert load_config([], overrides).parallel.batch_p2p_comm is (batched == "true")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "invalid YAML: .* at line 1, column 5; fix the file"),
        ("- a\n- b", "must contain sections such as 'algorithm:', found list"),
        (
            "algorithm:\n  gamma: 1\nalgorithm:\n  clip_low: 0.1\n",
            "duplicate key 'algorithm' at line 3",
        ),
        ("algorithm: {gamma: 1, gamma: 0.9}", "duplicate key 'gamma'"),
        ("algorithm:\n", "algorithm is a section, found None; set algorithm.FIELD=VALUE"),
        ("1: 2\n", "unknown field 1; valid names"),
        ("? [a]\n: 1\n", "invalid YAML: .*unhashable key"),
        ("model: &m {hf_path: *m}", "invalid YAML: maximum recursion depth exceeded"),
        ("seed: 2026-13-45", "invalid YAML: month must be in 1..12; fix the file"),
    ],
)
def test_files_that_are_not_a_configuration(tmp_path, text, message):
    (tmp_path / "a.yaml").write_text(text)
    assert re.search(message, rejected(path=tmp_path / "a.yaml"))


def test_files_that_cannot_be_read(tmp_path):
    message = rejected(path=tmp_path / "none.yaml")
    assert re.search("none.yaml: No such file.*; give an existing YAML file", message)
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    assert "a.yaml: invalid YAML" in rejected(path=tmp_path / "a.yaml")


def fields():
    for name, info in VapoConfig.model_fields.items():
        section = getattr(info.annotation, "model_fields", None)
        if section is None:
            yield name, info
        else:
            for field, inner in section.items():
                own = getattr(inner.annotation, "model_fields", {"": inner})
                yield from ((f"{name}.{field}.{n}".rstrip("."), f) for n, f in own.items())
    for field, info in SourceConfig.model_fields.items():
        yield f"data.sources.NAME.{field}", info


def test_help_has_every_field_with_default_symbol_kind_and_sentence():
    entries = describe_fields()
    for name, info in fields():
        entry = re.search(rf"^  {re.escape(name)}=(.*)\n      (.*)$", entries, re.MULTILINE)
        assert entry, name
        default = yaml.safe_load(re.split(r"  \(| \[(?=[a-zA-Z])", entry[1])[0])
        expected = info.get_default(call_default_factory=True)
        assert default == expected or math.isclose(float(default), float(expected))
        assert entry[2] == info.description and entry[2].endswith("."), name
        if info.json_schema_extra:
            assert f"[{info.json_schema_extra['symbol']}]" in entry[1]
    assert "algorithm.lambda_critic=1.0 [lambda_critic]  (number | same_as_actor)" in entries
    assert "rollout.kv_cache_bytes=null  (integer >= 1 | null)" in entries
    assert "algorithm.gamma=1.0 [gamma]  (number > 0, <= 1)" in entries


def test_every_section_has_a_heading():
    for name, info in VapoConfig.model_fields.items():
        if hasattr(info.annotation, "model_fields"):
            assert f"\n{name}: {info.annotation.__doc__}\n" in describe_fields()


def test_the_configuration_loads_neither_torch_nor_megatron():
    code = """
        from vapo_megatron.config import describe_fields, load_config
        load_config([], ["seed=1"]), describe_fields()
    """
    modules = ("pydantic", "yaml", "torch", "megatron", "vllm", "transformers", "numpy")
    assert loaded_by(code, modules) == ["pydantic", "yaml"]


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "configs").glob("*.yaml")), ids=str)
def test_every_example_loads(path):
    assert isinstance(load_config(path), VapoConfig)


def test_a_recipe_goes_by_its_name_and_a_file_by_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("grpo", "grpo.yaml", "mine"):
        (tmp_path / name).write_text("seed: 7\n")
    assert load_config("grpo").algorithm.advantage_estimator == "grpo"
    assert [load_config(name).seed for name in ("./grpo", "grpo.yaml", "mine")] == [7, 7, 7]
    both = load_config(["grpo", "./grpo"], ["algorithm.group_size=8"])
    assert (both.seed, both.algorithm.group_size) == (7, 8)
    assert {"vapo", "ppo", "grpo", "dapo"} <= set(recipe_names())
    message = "--config drgrpo is neither a file nor a recipe; did you mean dr_grpo"
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config("drgrpo")
