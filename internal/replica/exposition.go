package replica

import (
	"bytes"
	"math"
	"strconv"
	"strings"
)

// sample is one scrape's worth of what an engine tells. NaN is unknown.
type sample struct {
	running, waiting, kvUsage float64
	blockTokens, numBlocks    int
	start                     float64 // Seconds since the epoch.
	prompt, cached, generated float64 // Token counters, summed over engines.
	steps                     float64 // Engine steps; only for progress.
	adapters, waitingAdapters []string
	maxAdapters               int
}

// metricID is a metric the gateway reads.
type metricID uint8

const (
	metricRunning metricID = iota
	metricWaiting
	metricKVUsage
	metricCacheConfig
	metricLoRA
	metricPrompt
	metricCached
	metricCachedOld
	metricGenerated
	metricSteps
	metricStart
	metricCreated
	metricCount
)

// exposition reads the metrics the gateway needs out of Prometheus' text format. It is built once and safe for concurrent
// use.
//
// A library would do, at a cost: the text of one engine is 60 kB, almost all of it histograms, every second, for each
// replica. Skipping the lines that are not wanted takes a fiftieth of the time and hardly any memory; see the benchmark.
type exposition struct {
	names map[string]metricID
	// wanted are the names whose absence is worth a warning, as they were looked for.
	wanted [metricCount]string
}

func newExposition(n MetricNames) *exposition {
	e := &exposition{names: map[string]metricID{}}
	set := func(id metricID, override string, defaults ...string) {
		if override != "" {
			defaults = []string{override}
		}
		for _, d := range defaults {
			e.names[d] = id
		}
		e.wanted[id] = defaults[0]
	}
	set(metricRunning, n.Running, "vllm:num_requests_running")
	set(metricWaiting, n.Waiting, "vllm:num_requests_waiting")
	set(metricKVUsage, n.KVUsage, "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
	set(metricCacheConfig, n.CacheConfig, "vllm:cache_config_info")
	set(metricLoRA, n.LoRA, "vllm:lora_requests_info")
	set(metricPrompt, n.PromptTokens, "vllm:prompt_tokens_total")
	set(metricCached, n.CachedTokens, "vllm:prompt_tokens_cached_total")
	set(metricCachedOld, "", "vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
	set(metricGenerated, n.GenerationTokens, "vllm:generation_tokens_total")
	set(metricSteps, "", "vllm:iteration_tokens_total_count")
	set(metricStart, "", "process_start_time_seconds")
	set(metricCreated, "", "vllm:generation_tokens_created")
	return e
}

// parse reads text. Engines of one process are summed, and KV use is their mean. Lines it does not understand are passed
// over. missing names what a router would want and the text does not have.
func (e *exposition) parse(text []byte) (s sample, missing []string) {
	var sum [metricCount]float64
	var count [metricCount]int
	loraAt := math.Inf(-1)
	for len(text) > 0 {
		line := text
		if i := bytes.IndexByte(text, '\n'); i >= 0 {
			line, text = text[:i], text[i+1:]
		} else {
			text = nil
		}
		end := bytes.IndexAny(line, "{ \t")
		if end <= 0 || line[0] == '#' {
			continue
		}
		id, ok := e.names[string(line[:end])]
		if !ok {
			continue
		}
		rest := line[end:]
		var labels []byte
		if rest[0] == '{' {
			n := labelsEnd(rest)
			if n < 0 {
				continue
			}
			labels, rest = rest[1:n], rest[n+1:]
		}
		value, ok := number(rest)
		if !ok {
			continue
		}
		switch id {
		case metricCacheConfig:
			size, n := label(labels, "block_size"), label(labels, "num_gpu_blocks")
			if b, err := strconv.Atoi(size); err == nil && b > 0 && s.blockTokens == 0 {
				s.blockTokens = b
			}
			if b, err := strconv.Atoi(n); err == nil && b > 0 {
				s.numBlocks += b
			}
		case metricLoRA:
			// Old label sets stay; the value is the time of the update.
			if value >= loraAt {
				loraAt = value
				s.adapters = split(label(labels, "running_lora_adapters"))
				s.waitingAdapters = split(label(labels, "waiting_lora_adapters"))
				s.maxAdapters, _ = strconv.Atoi(label(labels, "max_lora"))
			}
		case metricStart, metricCreated:
			// Several processes behind one port: the youngest start is the one that lost its cache last.
			sum[id] = max(sum[id], value)
		default:
			sum[id] += value
		}
		count[id]++
	}
	get := func(id metricID) float64 {
		if count[id] == 0 {
			return math.NaN()
		}
		return sum[id]
	}
	s.running, s.waiting = get(metricRunning), get(metricWaiting)
	s.kvUsage = get(metricKVUsage) / float64(count[metricKVUsage])
	s.prompt, s.generated, s.steps = get(metricPrompt), get(metricGenerated), get(metricSteps)
	if s.cached = get(metricCached); math.IsNaN(s.cached) {
		s.cached = get(metricCachedOld)
	}
	if s.start = get(metricStart); math.IsNaN(s.start) {
		s.start = get(metricCreated)
	}
	for _, id := range [...]metricID{metricRunning, metricWaiting, metricKVUsage, metricCacheConfig, metricPrompt, metricGenerated, metricStart} {
		if count[id] == 0 {
			missing = append(missing, e.wanted[id])
		}
	}
	return s, missing
}

// labelsEnd returns the index of the brace that closes the label set at b[0], minding quotes; -1 if there is none.
func labelsEnd(b []byte) int {
	quoted := false
	for i := 1; i < len(b); i++ {
		switch c := b[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case c == '}' && !quoted:
			return i
		}
	}
	return -1
}

// number reads the value that stands before an optional time stamp.
func number(b []byte) (float64, bool) {
	fields := bytes.Fields(b)
	if len(fields) == 0 {
		return 0, false
	}
	v, err := strconv.ParseFloat(string(fields[0]), 64)
	return v, err == nil && !math.IsNaN(v)
}

// label returns the value of a label; empty if there is none.
func label(labels []byte, name string) string {
	for len(labels) > 0 {
		eq := bytes.IndexByte(labels, '=')
		if eq < 0 || eq+1 >= len(labels) || labels[eq+1] != '"' {
			return ""
		}
		key := bytes.Trim(labels[:eq], " ,\t")
		end := eq + 2
		for end < len(labels) && labels[end] != '"' {
			if labels[end] == '\\' {
				end++
			}
			end++
		}
		if end >= len(labels) {
			return ""
		}
		if string(key) == name {
			return labelUnescape.Replace(string(labels[eq+2 : end]))
		}
		labels = labels[end+1:]
	}
	return ""
}

var labelUnescape = strings.NewReplacer(`\\`, `\`, `\"`, `"`, `\n`, "\n")

// split splits a list of adapter names.
func split(s string) []string {
	var out []string
	for part := range strings.SplitSeq(s, ",") {
		if part = strings.TrimSpace(part); part != "" {
			out = append(out, part)
		}
	}
	return out
}
