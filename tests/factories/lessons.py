"""Numbers that lessons state, where they compute them, and what they propose to try."""

import re

import numpy as np

_PROMPTS = "row(every, model='2b', batch=1, mode='graph', provider='auto torch.compile')"
_DECODE = "row(at, provider='triton decode', mode='graph').set_index('tokens')['speedup']"
_EAGER = "row(at, provider='auto', mode='eager').set_index('tokens')['speedup']"
_COMPILED = "row(at, provider='auto', mode='compiled').set_index('tokens')['speedup']"
# By lesson: a piece of its text with a number in brackets, and where the lesson computes it, in its
# own names. `row` picks a table's rows. A later measurement cannot contradict the text unseen.
NUMBERS = {
    "01_format": {
        r"hybrid takes (\d+)% of the dense": "100 * relative.loc[30, 'Hybrid, width 128']",
        r"dense bytes, ELL (\d+)%": "100 * relative.loc[30, 'ELL']",
        r"the sum: (\d+) against": "len(union)",
        r"the sum: \d+ against (\d+)": "int((g != 0).sum())",
    },
    "02_sparsity": {
        r"from (\d+) neurons without L1": "levels['active'].iloc[0]",
        r"without L1 to (\d+) at 6e-4": "row(levels, l1_coefficient=6e-4)['active']",
        r"\*improves\*, by up to ([\d.]+)%": "-levels['cross_entropy_change'].min()",
        r"gains less: ([\d.]+)%": "-prices['100 M']",
        r"instead of ([\d.]+)% at 95%": "-prices['50 M']",
        r"end ([\d.]+) nats apart": "row(swept, l1_coefficient=0)['cross_entropy']"
        ".agg(lambda values: values.max() - values.min())",
        r"Without a gate L1 works too: (\d+)": "row(beside, choice='non-gated')['active'].min()",
        r"(\d+)% at 6e-4": "100 * row(levels, l1_coefficient=6e-4)['dead_fraction_train']",
        r"(\d+)% at 5e-3": "100 * row(levels, l1_coefficient=5e-3)['dead_fraction_train']",
        r"leaves (\d)% of the neurons dead": "row(beside, choice='re-initialisation')['dead']",
        r"less sparse: (\d+) active": "row(beside, choice='L1 warm-up')['active']",
        r"Activity rises by\s+(\d+)%": "100 * row(beside, choice='re-initialisation')['active'] "
        "/ row(levels, l1_coefficient=6e-4)['active'] - 100",
        r"Warm-up leaves (\d+)%\s+dead": "row(beside, choice='L1 warm-up')['dead']",
        r"and is ([\d.]+)% worse at 1.5e-3": "row(levels, l1_coefficient=1.5e-3)"
        "['cross_entropy_change']",
        r"warm-up ([\d.]+) points more": "row(beside, choice='L1 warm-up')['change'] "
        "- row(levels, l1_coefficient=6e-4)['cross_entropy_change']",
        r"SiLU is ([\d.]+)% better": "-row(beside, choice='SiLU')['change']",
        r"at 6e-4 from ([\d.]+)% on 25 M": "-row(by_tokens, "
        "l1_coefficient=6e-4, tokens=25e6)['change']",
        r"on 25 M tokens to ([\d.]+)% on": "-row(by_tokens, "
        "l1_coefficient=6e-4, tokens=50e6)['change']",
        r"rises by ([\d.]+) ± [\d.]+ points": "quantities['trend_slope']",
        r"rises by [\d.]+ ± ([\d.]+) points": "quantities['trend_slope_limit']",
        r"a change of ([\d.]+)% is noise": "0.5 * sum(row(by_tokens, l1_coefficient=1.5e-4, "
        "tokens=1e8)[['change_high', 'change_low']] * [1, -1])",
        r"gain falls from ([\d.]+) to [\d.]+%; a": "-row(by_tokens, l1_coefficient=1.5e-4, "
        "tokens=5e7)['change']",
        r"gain falls from [\d.]+ to ([\d.]+)%; a": "-row(by_tokens, l1_coefficient=1.5e-4, "
        "tokens=1e8)['change']",
        r"noise below about ([\d.]+) points": "analysis.contrasts(analysis.choices("
        "trained[trained['tokens'] == 5e7], budget_log))['limit'].min()",
        r"before: ([\d.]+) ± [\d.]+ points less": "-quantities['trend_bend']",
        r"before: [\d.]+ ± ([\d.]+) points less": "quantities['trend_bend_limit']",
        r"less at 6e-4, ([\d.]+) ±": "-quantities['lower_trend_bend']",
        r"less at 6e-4, [\d.]+ ± ([\d.]+) at": "quantities['lower_trend_bend_limit']",
        r"gain falls from ([\d.]+)% on 25 M": "-row(by_tokens, "
        "l1_coefficient=1.5e-4, tokens=25e6)['change']",
        r"on 25 M to ([\d.]+)% on 300 M": "-quantities['lower_trend_last_change']",
        r"on 300 M this level costs ([\d.]+) ±": "quantities['trend_last_change']",
        r"this level costs [\d.]+ ± ([\d.]+)%": "analysis.noise_limit(table, "
        "'cross_entropy_change', 1, 1)",
        r"On 300 M the price at 6e-4 is ([\d.]+)% on": "quantities['trend_last_train_change']",
        r"At 1.5e-4 it is ([\d.]+)%": "quantities['lower_trend_last_train_change']",
        r"at 6e-4 from (\d+) neurons to": "row(by_tokens, l1_coefficient=6e-4, "
        "tokens=1e8)['active']",
        r"at 6e-4 from \d+ neurons to (\d+)": "row(by_tokens, l1_coefficient=6e-4)"
        "['active'].iloc[-1]",
    },
    "03_layerwise": {
        r"In all (\d+) traced models": "len(found.dropna(subset='overflow'))",
        r"\*last\* layer, (\d+) of": "at_level['mean'].iloc[-1]",
        r"at least (\d+) times the mean": "(at_level['max'] / at_level['mean']).min()",
        r"overflow in (\d+) of 12": "sum(row(overflow, compression=8)['overflow_rows'] > 0)",
        r"for ([\d.]+)% of the tokens": "100 * max(row(overflow, compression=8)['overflow_rows'])",
        r"needs (\d+) to": "row(unions, block=64)['mean'].min()",
        r"needs \d+ to ([\d,]+) neurons": "row(unions, block=64)['mean'].max()",
        r"would need (\d+) to": "independent.min()",
        r"would need \d+ to ([\d,]+):": "independent.max()",
        r"narrow model: ([\d.]+)%": "100 * analysis.per_layer(wide)['active_fraction'].mean()",
        r"instead of ([\d.]+)%": "100 * share.mean()",
        r"holds in (\d) of 3 seeds": "groups['seeds']['ten_times'].sum()",
        r"in (\d+) of 26 models": "groups['level']['ten_times'].sum()",
        r"([\d.]+)% of the tokens have such": "100 * found['overflow'].min()",
        r"all (\d+) traced": "found['first_is_most'].notna().sum()",
    },
    "04_tokens": {
        r"with (\d+) neurons a layer": "positions['mean_active'].iloc[0]",
        r"later there are (\d+)": "positions['mean_active'].iloc[10]",
        r"end of the context (\d+)": "positions['mean_active'].iloc[-32:].mean()",
    },
    "05_speedup": {
        r"unions are ([\d.]+) times": "of_layer['large_times']",
        r"some (\d+) active at 131,072": "of_layer['large_crossing']",
        r"One token gains ([\d.]+) times": "of_layer['one_times']",
        r"skewed activity unions gain ([\d.]+) times at 28": "of_step['middle_union']",
        r"even between (\d+) and": "of_step['skewed_crossing']",
        r"where row-wise reaches ([\d.]+)": "row(stream, pattern='even', tokens=16384)"
        ".query('28 < active < 30 and provider == \"triton rowwise\"')['speedup'].iloc[0]",
        r"gain falls to ([\d.]+) to": f"{_DECODE}.loc[96:256].min()",
        r"to ([\d.]+) between 96": f"{_DECODE}.loc[96:256].max()",
        r"At 512 decode gains ([\d.]+)": f"{_DECODE}[512]",
        r"At 1,024 unions gain (\d+)%": "100 * row(at, tokens=1024, provider='triton union', "
        "mode='graph')['speedup'] - 100",
        r"after the other it has ([\d.]+) to": f"{_EAGER}.loc[:1024].min()",
        r"it has [\d.]+ to ([\d.]+) times the speed": f"{_EAGER}.loc[:1024].max()",
        r"up to four tokens gain ([\d.]+) to": f"{_COMPILED}.loc[:4].min()",
        r"four tokens gain [\d.]+ to ([\d.]+)": f"{_COMPILED}.loc[:4].max()",
        r"at ([\d.]+) to [\d.]+ times the speed of dense": f"{_COMPILED}.loc[5:].min()",
        r"to ([\d.]+) times the speed of dense": f"{_COMPILED}.loc[5:].max()",
        r"unions alone gain ([\d.]+) times": "of_layer['small_eager_times']",
        r"Sparse FP8 is ([\d.]+) times": "of_fp8['large_sparse']",
        r"and dense FP8 ([\d.]+) times": "of_fp8['large_dense']",
        r"also costs less: ([\d.]+) nats": "of_fp8['shipped_sparse']",
        r"nats instead of ([\d.]+); its": "of_fp8['shipped_dense']",
        r"The 2B model gains (\d+)%": "of_fp8['ffn_sparse']",
        r"and (\d+)% with dense FP8": "of_fp8['ffn_dense']",
    },
    "06_downstream": {
        r"nearest: ([\d.]+) points": "-row(pairs, task='continuation')['difference']",
        r"of up to ([\d.]+) to [\d.]+ points": "(pairs['limit'] - pairs['difference'])[:5].min()",
        r"of up to [\d.]+ to ([\d.]+) points": "(pairs['limit'] - pairs['difference'])[:5].max()",
        r"(\d+)% by mutual": "100 * row(live, metric='acc_mutual_info')['accuracy']",
        r"(\d+)% by plain": "100 * row(live, metric='acc')['accuracy']",
        r"the flagship has (\d+)% on": "100 * row(table, model='flagship-triton', backend='dense', "
        "dtype='float32', task='openbookqa', metric='acc_norm')['accuracy']",
        r"OpenBookQA instead of (\d+)%": "100 * "
        "row(table, model='flagship-triton', backend='dense', "
        "dtype='float32', task='openbookqa', metric='acc')['accuracy']",
        r"paper loses ([\d.]+) points": "-100 * analysis.paper_levels(paper)['accuracy'].diff()[1]",
        r"at 2e-5 and ([\d.]+) at": "100 * -(analysis.paper_levels(paper)['accuracy'].iloc[[0, 2]]"
        ".diff().iloc[-1])",
    },
    "07_inspect": {
        r"(\d+)% of its firings": "100 * specific['share'].iloc[0]",
        r"median of \$\\phi\$ is ([\d.]+)": "specific['phi'].median()",
        r"together (\d+) times": "(pairs['both'] / pairs['expected']).iloc[0]",
        r"rank correlation is ([\d.]+)": "quantities['rank']",
        r"one costs ([\d.]+) nats": "cost['loss_change'].max()",
        r"neurons ([\d,]+) have a row": "len(specific)",
        r"falls, from \d+ to (\d+)": "bins['active'].min()",
        r"then rises to (\d+)\.": "bins['active'].iloc[-1]",
    },
    "08_models": {
        r"Inference gains (\d+) to": "row(scale, quantity='forward speed')['change'].min()",
        r"Inference gains \d+ to (\d+)": "row(scale, quantity='forward speed')['change'].max()",
        r"training gains (\d+) to": "row(scale, quantity='training speed')['change'].min()",
        r"training gains \d+ to (\d+)": "row(scale, quantity='training speed')['change'].max()",
        r"up and down shrink: ([\d.]+) instead": "row(layer, side='sparse')['p50']",
        r"instead of ([\d.]+) ms\. In": "row(layer, side='dense')['p50']",
        r"In FP8 it is ([\d.]+) instead": "row(layer, side='sparse FP8')['p50']",
        r"it is [\d.]+ instead of ([\d.]+) ms": "row(layer, side='dense FP8')['p50']",
        r"One document gains (\d+)%": "of_models['decode_1']",
        r"; 32 gain (\d+)%": "of_models['decode_32']",
        r"128 tokens gains (\d+)%": f"100 * row({_PROMPTS}, tokens=128)['speedup'] - 100",
        r"of 512 gains (\d+)%": f"100 * row({_PROMPTS}, tokens=512)['speedup'] - 100",
        r"of 2,048 gains (\d+)%": f"100 * row({_PROMPTS}, tokens=2048)['speedup'] - 100",
        r"takes (\d+)% of the dense layer": "100 * (lambda t: t['attention'] / t['total'])"
        "(row(parts, tokens=128, provider='dense torch.compile'))",
        r"instead of (\d+)% for one document": "100 * (lambda t: t['attention'] / t['total'])"
        "(row(parts, tokens=1, provider='dense torch.compile'))",
    },
    "09_training_choices": {
        r"and have (\d+)% more active": "row(analysis.contrasts(table), choice='non-gated', "
        "l1_coefficient=6e-4).query('quantity.str.startswith(\"active\")')['difference'].item()",
        r"cost ([\d.]+) and [\d.]+% less": "(lambda t: t['line_price'] - t['price'])"
        "(row(beside, choice='balanced columns', l1_coefficient=6e-4))",
        r"cost [\d.]+ and ([\d.]+)% less": "(lambda t: t['line_price'] - t['price'])"
        "(row(beside, choice='balanced columns', l1_coefficient=1.5e-3))",
        r"of another width, pays ([\d.]+)%": "subjects['training']['race_change']",
        r"differs by ([\d.]+) nats": "abs(flagships['cross_entropy'].diff().iloc[-1])",
        r"train ([\d.]+) times as\s+fast": "1 + subjects['training']['faster_late'] / 100",
        r"with (\d+)% less memory": "-subjects['training']['memory_late']",
        r"whole training is (\d+)% faster": "analysis.quantities.training(flagships, "
        "analysis.computed_curves(*results.load_runs(root / runs, flagship)))['faster_whole']",
        r"peak is (\d+)% higher": "subjects['training']['memory_whole']",
        r"higher \((\d+) against": "subjects['training']['whole_gb']",
        r"against (\d+) GB": "subjects['training']['dense_gb']",
        r"at ([\d.]+) nats [\d.]+ instead": "subjects['training']['early_loss']",
        r"nats ([\d.]+) instead": "subjects['training']['early_second']",
        r"nats [\d.]+ instead of ([\d.]+) minutes": "subjects['training']['early_first']",
        r"It is ([\d.]+) times as fast,": "(lambda t: t.iloc[0] / t.iloc[-1])"
        "(raced.groupby('run', sort=False)['seconds'].max())",
        r"but ends ([\d.]+)% higher": "subjects['training']['race_change']",
        r"sparse model ends ([\d.]+)% higher": "subjects['training']['race_train_change']",
        r"200 M tokens it ends at ([\d.]+)": "analysis.race(*results.load_runs("
        "root / runs, 'flagship-200m-l1-0'))['cross_entropy'].iloc[-1]",
        r"after (\d+)% of its tokens": "100 * ends['tokens'].min() / ends['tokens'].max()",
        r"tokens and ([\d.]+) instead": "subjects['training']['race_first']",
        r"tokens and [\d.]+ instead of ([\d.]+) minutes": "subjects['training']['race_second']",
        r"move this from ([\d.]+) to": "subjects['training']['race_soonest']",
        r"move this from [\d.]+ to ([\d.]+)": "subjects['training']['race_latest']",
        r"Memory falls to (\d+) GB": "row(speeds, metric='peak_memory')['value'].min() / 1e9",
        r"Two GPUs are ([\d.]+) ±": "subjects['training']['devices_times']",
        r"Two GPUs are [\d.]+ ± ([\d.]+)": "subjects['training']['devices_times_limit']",
        r"drawn pair is ([\d.]+)": "-scaled[0]['cross_entropy'].diff().iloc[-1]",
        r"two differ by at most ([\d.]+)\.": "max(abs(of['cross_entropy'].diff().iloc[-1]) "
        "for of in scaled[1:])",
        r"leaves (\d+)% dead": "100 * row(beside, choice='L1 warm-up')['dead']",
        r"same activity (\d+)%": "100 * row(beside, choice='L1 warm-up')['line_dead']",
        r"costs ([\d.]+)% more than that": "(lambda t: t['price'] - t['line_price'])"
        "(row(beside, choice='L1 warm-up'))",
        r"raises it by (\d+)%": "row(analysis.contrasts(table), choice='re-initialisation', "
        "quantity='active neurons, %; difference relative')['difference']",
        r"(\d+)% more memory": "100 * scaled[0]['peak_memory'].pct_change().iloc[-1]",
    },
    "10_clusters": {
        r"training takes ([\d.]+) hours": "row(costs, gpus=8)['hours'].iloc[0]",
        r"densely and ([\d.]+) sparsely": "row(costs, gpus=8)['hours'].iloc[1]",
        r"with ([\d.]+) and [\d.]+ MWh": "row(costs, gpus=8)['energy'].iloc[0]",
        r"with [\d.]+ and ([\d.]+) MWh": "row(costs, gpus=8)['energy'].iloc[1]",
        r"it takes ([\d.]+) and": "row(costs, gpus=64, shards='a node')['hours'].iloc[0]",
        r"it takes [\d.]+ and ([\d.]+)": "row(costs, gpus=64, shards='a node')['hours'].iloc[1]",
        r"both\s+take ([\d.]+) hours": "row(costs, gpus=512, shards='all GPUs')['hours'].max()",
        r"models wait on (\d+) GPUs": "row(stops, shards='all GPUs')['gpus'].min()",
        r"dense model waits from (\d+)": "row(stops, shards='a node')['gpus'].iloc[0]",
        r"sparse one from (\d+)": "row(stops, shards='a node')['gpus'].iloc[1]",
    },
    "11_one_word": {
        r"at all (\d+) places of": "row(specific, layer=layer, neuron=neuron)['both']",
        r"of its (\d+) firings": "row(specific, layer=layer, neuron=neuron)['fires']",
        r"likeliest has (\d+)% with": "100 * table.iloc[:, 0].max()",
        r"more than ([\d.]+)%: the model": "100 * table.iloc[:, 1].max()",
        r"rises by ([\d.]+) nats": "row(effects, factor=0)['rise'].iloc[0]",
        r"nats \(([\d.]+) to": "row(effects, factor=0)['low'].iloc[0]",
        r"to ([\d.]+)\), which": "row(effects, factor=0)['high'].iloc[0]",
        r"follows (\d+) times": "2.71828 ** row(effects, factor=0)['rise'].iloc[0]",
        r"the rise is ([\d.]+) nats": "row(effects, factor=0.5)['rise'].iloc[0]",
        r"has (\d+) places in": "row(effects, factor=0)['tokens'].iloc[0]",
        r"after the word by less than ([\d.]+) nats": "max(0.001, "
        "abs(silent.loc[f'neuron {other}', 'rise'].iloc[0]))",
    },
    "12_pretrained": {
        r"divergence is ([\d.]+) nats": "course[course['tokens'] == 0].set_index('name')"
        "['kl']['ReLU alone']",
        r"nats with (\d+)% of": "100 * course[course['tokens'] == 0].set_index('name')"
        "['active_fraction']['ReLU alone']",
        r"students begin with (\d+)%": "100 * course[course['tokens'] == 0].set_index('name')"
        "['active_fraction']['10%, threshold 0.5']",
        r"wanted end at ([\d.]+)%": "100 * table.set_index('name')['active_fraction']"
        "['10%, threshold 0.5, 120 M tokens']",
        r"within ([\d.]+) points of the wanted": "100 * abs(table.loc[table['by'].str.startswith("
        "'threshold'), 'active_fraction'] - 0.1).max()",
        r"from 0.5 to ([\d.]+) and": "log[(log['metric'] == 'threshold') & "
        "(log['run'] == 'relufy-0.1-by-t-sampled-1.6e8')]['value'].max()",
        r"to 0.55 and falls to ([\d.]+)\.": "table.set_index('run')['threshold']"
        "['relufy-0.1-by-t-sampled-1.6e8']",
        r"begins at ([\d.]+) nats \(not drawn": "log[(log['run'] == 'relufy-0.1-by-t-chat') & "
        "(log['metric'] == 'kl')]['value'].iloc[0]",
        r"costs as much \(([\d.]+) nats\)": "table.set_index('name')['kl']['10% by a threshold']",
        r"bring 10% to ([\d.]+) nats": "table.set_index('run')['kl']"
        "['relufy-0.1-by-t-sampled-1.6e8']",
        r"nats, and to ([\d.]+) where half": "row(everyone, "
        "run='relufy-0.1-by-t-chat-1.6e8')['kl']",
        r"It is ([\d.]+) points below the original; a": "-quantities['held_difference']",
        r"over items \(([\d.]+) to": "-quantities['held_high']",
        r"over items \(1.4 to ([\d.]+)\)": "-quantities['held_low']",
        r"of ReLU alone loses ([\d.]+) points \(`again": "-over(answers, 'again-0')",
        r"a threshold lose ([\d.]+) to": "-over(answers, 'again-0.1-by-t-seed-2')",
        r"lose 3.2 to ([\d.]+)\.": "-over(answers, 'relufy-0.1-by-t')",
        r"nats (\d+) students scatter": "frontier['students']",
        r"students scatter by ([\d.]+) points": "100 * frontier['deviation']",
        r"falls with the divergence: from ([\d.]+) to": "frontier['nearest']",
        r"from 0.19 to ([\d.]+) nats": "everyone['kl'].max()",
        r"the original at ([\d.]+) nats \(": "frontier['kl']",
        r"0.19 nats \(([\d.]+) to": "frontier['low']",
        r"0.19 nats \(0.14 to ([\d.]+)\)": "frontier['high']",
        r"ends at ([\d.]+) nats and loses": "row(everyone, run='rate-5e-4-hidden-2e8')['kl']",
        r"nats and loses ([\d.]+) points, where": "-over(answers, 'rate-5e-4-hidden-2e8')",
        r"where the line has ([\d.]+)\.": "-on_line(frontier, row(everyone, "
        "run='rate-5e-4-hidden-2e8')['kl'])",
        r"usual rate end at ([\d.]+) to": "everyone[everyone['run'].str.startswith("
        "'hidden-0.1-by-t-2e8')]['kl'].min()",
        r"end at 0.198 to ([\d.]+);": "everyone[everyone['run'].str.startswith("
        "'hidden-0.1-by-t-2e8')]['kl'].max()",
        r"are recorded loses ([\d.]+)\.": "-over(answers, 'hidden-0.1-by-t-2e8-seed-1')",
        r"the divergence to ([\d.]+);": "row(everyone, run='hidden-0.1-by-t')['kl']",
        r"not fitted either, it is ([\d.]+)\.": "row(everyone, run='unfitted-0.1-by-t')['kl']",
        r"say ([\d.]+) and 0.13": "other_line(everyone, answers, 0.5)",
        r"say 0.17 and ([\d.]+)": "other_line(everyone, answers, 1)",
        r"more are ([\d.]+) to 0.4": "on_line(frontier, row(everyone, "
        "run='rate-5e-4-hidden-2e8')['kl']) "
        "- over(answers, 'rate-5e-4-hidden-2e8')",
        r"are 0.1 to ([\d.]+) points below": "on_line(frontier, row(everyone, "
        "run='hidden-0.1-by-t-8e7')['kl']) - over(answers, 'hidden-0.1-by-t-8e7')",
        r"a doubling takes (\d+)%": "100 - 100 * (row(everyone, run='hidden-0.1-by-t-2e8')"
        "['kl'] / row(everyone, run='hidden-0.1-by-t-8e7')['kl']) ** (1 / np.log2(2.5))",
        r"usual rate needs (\d+) M": "outlook['tokens'].min() / 1e6",
        r"text with samples (\d+) M": "sorted(outlook['tokens'])[1] / 1e6",
        r"they had, and ([\d,]+) M": "outlook['more'].min() / 1e6",
        r"on our text \(([\d.]+) instead": "table.set_index('run')['kl']['relufy-0.1-by-t-chat']",
        r"0.38 instead of ([\d.]+) nats": "everyone.set_index('run')['kl']['unfitted-0.1-by-t']",
        r"each student loses ([\d.]+) points more": "over(answers, 'again-0') "
        "- over(answers, 'relufy-0')",
        r"up to ([\d.]+) points apart": "over(answers, 'again-0.1-by-t-seed-2') "
        "- over(answers, 'relufy-0.1-by-t')",
        r"it answers ([\d.]+) points better": "over(answers, 'relufy-0.1-by-t-chat-1.6e8') "
        "- over(answers, 'fitted-0.1-by-t-chat-1.6e8')",
        r"diverge by (\d+) to": "-max(map(float, quantities['cuts'].replace('−', '-').split(',')))",
        r"28 to (\d+)% less": "-min(map(float, quantities['cuts'].replace('−', '-').split(',')))",
        r"18 on have (\d+) to": "100 * row(layers, name='10%, threshold 0.5')"
        ".query('layer >= 18 or layer == 0')['active_fraction'].min()",
        r"10 to (\d+)%, layers": "100 * row(layers, name='10%, threshold 0.5')"
        ".query('layer >= 18 or layer == 0')['active_fraction'].max()",
        r"1 to 7 below (\d+)%": "np.ceil(100 * row(layers, name='10%, threshold 0.5')"
        ".query('1 <= layer <= 7')['active_fraction'].max())",
        r"to 29 stay below (\d+)%": "np.ceil(100 * row(layers, name='10%')"
        ".query('layer >= 23')['active_fraction'].max())",
        r"loses ([\d.]+) points of": "-quantities['alone_difference']",
        r"original's ([\d.]+)%\.": "answered['accuracy'][0] - quantities['alone_difference']",
        r"began at 1e-4 ends at ([\d.]+) nats": "analysis.relufied_runs("
        "*results.load_runs(root / runs, 'light-0.1'))['kl'].item()",
        r"above the ([\d.]+) of 1e-3": "table.set_index('name')['kl']['10%']",
        r"active, [\d.]+ to ([\d.]+) points at": "-100 * pairs.query(\"task == 'mean' and "
        "reference == 'ReLU alone'\").set_index('name')['difference'].loc[lambda of: "
        "of.index.str.startswith(('10%', '20%'))].min()",
        r"2.7 and ([\d.]+) at 2%": "-100 * pairs.query(\"task == 'mean' and "
        "reference == 'ReLU alone' and name == '2%'\")['difference'].item()",
        r"fixed one, which has ([\d.]+)% active": "100 * table.set_index('name')"
        "['active_fraction']['10%, threshold 0.5']",
        r"active, ([\d.]+) to [\d.]+ points": "-100 * pairs.query(\"task == 'mean' and "
        "reference == 'ReLU alone' and run == 'relufy-0.1-by-t-sampled'\")['difference'].item()",
        r"at 8 to 20%, ([\d.]+) and 3.5 at 2%": "-quantities['sparsest_difference']",
        r"held-out text it ends at ([\d.]+), not": "table.set_index('run')['kl']"
        "['relufy-0.1-by-t-sampled-1.6e8']",
        r"ends at 0.23, not at ([\d.]+)\.": "row(course, run='relufy-0.1-by-t-sampled-1.6e8')"
        "['kl'].iloc[-1]",
        r"student loses ([\d.]+) points, ReLU": "five_tasks_lost(pairs, 'relufy-0.1-t-0.5')",
        r"ReLU alone ([\d.]+)\.": "five_tasks_lost(pairs, 'relufy-0')",
        r"measured share: ([\d.]+) times": "row(gains, calls='one token', hidden_size=4096)"
        ".sort_values('active_fraction')['speedup'].iloc[-1]",
        r"on an H100, one token gains ([\d.]+) times": "row(own, calls='one token')"
        "['speedup'].min()",
        r"There a large batch gains ([\d.]+) times": "row(own, calls='many tokens')"
        "['speedup'].max()",
        r"loses at 10% \(([\d.]+)\)": "row(own, calls='many tokens')['speedup'].min()",
        r"A large batch gains ([\d.]+) times": "row(gains, tokens=131072, gated=True).query("
        "'0.005 < active_fraction < 0.006')['speedup'].iloc[0]",
        r"From (\d+)% on": "100 * row(ends, calls='many tokens')['slower_at'].min()",
        r"above (\d+)% the one": "100 * row(ends, calls='many tokens')['faster_at'].max()",
    },
}
# By lesson: what "Try it" proposes as other parameters.
TRY = {
    "01_format": [{"token": 0, "layer": 5}, {"compression": 32}],
    "03_layerwise": [{"aggregate": "data/checkpoints/twell-6m/aggregate.npz"}],
    "05_speedup": [{"widths": [4096, 14336], "level": 73}],
    "08_models": [{"trained_model": "twell-6m"}],
    "09_training_choices": [{"family": "85m-50m-l1-*-seed-0"}],
    "11_one_word": [{"word": " United"}],
    "10_clusters": [{"size": "1.5b", "active": 29}],
    "12_pretrained": [{"relufied": "relufy-0.0*"}],
}


def row(table, **values):
    """The rows of a table with these values; of one row, its entries."""
    for column, value in values.items():
        table = table[table[column] == value]
    return table.iloc[0] if len(table) == 1 else table


def over(pairs, run):
    """Points by which a run's mean accuracy is above its original's."""
    of_run = pairs.query("task == 'mean' and reference == 'original'").set_index("run")
    return 100 * of_run["difference"][run]


def on_line(frontier, kl):
    """Points over the original at a divergence, on the line of `relufied_frontier`."""
    return 100 * (frontier["intercept"] + frontier["slope"] * np.log(kl))


def other_line(table, pairs, power):
    """The divergence at which 2 points are lost, by a line over a power of it."""
    of_run = pairs.query("task == 'mean' and reference == 'original'").set_index("run")
    kl = table.set_index("run")["kl"][of_run.index] ** power
    slope, intercept = np.polyfit(kl, of_run["difference"].astype(float), 1)
    return ((-0.02 - intercept) / slope) ** (1 / power)


def five_tasks_lost(pairs, run):
    """Points that a run loses on the tasks in which the original is not at chance, in the mean."""
    at_chance = "commonsense_qa", "winogrande", "mean"
    own = pairs[(pairs["run"] == run) & (pairs["reference"] == "original")]
    return -100 * own.loc[~own["task"].isin(at_chance), "difference"].mean()


HELPERS = {
    "row": row,
    "np": np,
    "five_tasks_lost": five_tasks_lost,
    "over": over,
    "on_line": on_line,
    "other_line": other_line,
}


def wrong_numbers(cells, names, numbers):
    """The pieces of a lesson's text whose number is not the computed one, to its last digit.

    Whole numbers from 100 on are rounded in texts: 3% are allowed.
    """
    text = "\n".join(cell.source for cell in cells if cell.kind == "markdown")
    text, wrong = re.sub(r"\s+", " ", text), []
    for pattern, code in numbers.items():
        stated = [piece.rstrip(".,") for piece in re.findall(pattern, text)]
        number = float(stated[0].replace(",", "")) if len(stated) == 1 else np.nan
        digits = len(stated[0].partition(".")[2]) if stated else 0
        value = float(eval(code, names | HELPERS))
        allowed = 0.03 * number if number >= 100 else 0.5 * 10**-digits
        if not abs(value - number) <= allowed * (1 + 1e-6):
            wrong.append(f"{pattern}: {stated}, computed {value:.5g}")
    return wrong
