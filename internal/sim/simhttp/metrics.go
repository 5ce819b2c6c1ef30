package simhttp

import (
	"maps"
	"net/http"
	"strconv"
	"strings"
	"time"

	"prefixgate/internal/sim"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// metrics are served under vLLM's names and labels, not this project's: the gateway scrapes them. The engine's own counts are
// read when they are asked for.
type metrics struct {
	server  *Server
	handler http.Handler

	firstToken, interToken, latency, promptTokens, generatedTokens prometheus.Observer
	finished                                                       *prometheus.CounterVec
	lora                                                           *prometheus.GaugeVec
}

// maxLoras is how many adapters can be loaded at once.
const maxLoras = 4

// Buckets as vLLM has them.
var (
	firstTokenBuckets = []float64{.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560}
	interTokenBuckets = []float64{.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80}
	latencyBuckets    = []float64{.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680}
	tokenBuckets      = []float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000}
)

// reading is a value that is read from the engine at each scrape.
type reading struct {
	desc  *prometheus.Desc
	typ   prometheus.ValueType
	value func(sim.Stats) float64
}

// engineCollector turns the engine's counts into metrics.
type engineCollector struct {
	server   *Server
	readings []reading
	start    *prometheus.Desc
}

func newMetrics(s *Server) *metrics {
	m := &metrics{server: s}
	reg := prometheus.NewRegistry()
	labels := prometheus.Labels{"engine": "0", "model_name": s.opts.Model}
	histogram := func(name, help string, buckets []float64) prometheus.Observer {
		h := prometheus.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets, ConstLabels: labels})
		register(reg, h)
		return h
	}
	m.firstToken = histogram("vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.", firstTokenBuckets)
	m.interToken = histogram("vllm:inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", interTokenBuckets)
	m.latency = histogram("vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", latencyBuckets)
	m.promptTokens = histogram("vllm:request_prompt_tokens", "Number of prefill tokens processed.", tokenBuckets)
	m.generatedTokens = histogram("vllm:request_generation_tokens", "Number of generation tokens processed.", tokenBuckets)
	m.finished = prometheus.NewCounterVec(prometheus.CounterOpts{ //nolint:promlinter // vLLM's name
		Name: "vllm:request_success_total", Help: "Count of successfully processed requests.",
	}, []string{"engine", "finished_reason", "model_name"})
	for _, reason := range []string{"stop", "length", "abort", "error", "repetition"} {
		m.finished.WithLabelValues("0", reason, s.opts.Model)
	}
	register(reg, m.finished)
	if len(s.opts.Adapters) > 0 {
		m.lora = prometheus.NewGaugeVec(prometheus.GaugeOpts{ //nolint:promlinter // vLLM's name
			Name: "vllm:lora_requests_info", Help: "Running stats on lora requests.",
		}, []string{"max_lora", "running_lora_adapters", "waiting_lora_adapters"})
		register(reg, m.lora)
	}
	info := prometheus.NewGauge(prometheus.GaugeOpts{ //nolint:promlinter // vLLM's name
		Name: "vllm:cache_config_info", Help: "Information of the LLMEngine CacheConfig",
		ConstLabels: prometheus.Labels{
			"block_size": strconv.Itoa(s.opts.Engine.BlockTokens), "num_gpu_blocks": strconv.Itoa(s.opts.Engine.NumBlocks),
			"cache_dtype": "auto", "enable_prefix_caching": "True", "engine": "0", "gpu_memory_utilization": "0.92",
			"prefix_caching_hash_algo": "xxhash64", "sliding_window": "None", "user_specified_block_size": "True",
		},
	})
	info.Set(1)
	register(reg, info)
	register(reg, newEngineCollector(s, labels))
	inner := promhttp.HandlerFor(reg, promhttp.HandlerOpts{})
	m.handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		m.touchLora()
		inner.ServeHTTP(w, r)
	})
	return m
}

func register(reg *prometheus.Registry, c prometheus.Collector) {
	if err := reg.Register(c); err != nil {
		panic("BUG: register a metric: " + err.Error())
	}
}

// touchLora marks the present set of adapters as the latest. Series of earlier sets stay, as they do in vLLM.
func (m *metrics) touchLora() {
	if m.lora == nil {
		return
	}
	now := float64(time.Now().UnixMicro()) / 1e6
	m.lora.WithLabelValues(strconv.Itoa(maxLoras), strings.Join(m.server.runningAdapters(), ","), "").Set(now)
}

func newEngineCollector(s *Server, labels prometheus.Labels) *engineCollector {
	c := &engineCollector{
		server: s,
		start:  prometheus.NewDesc("process_start_time_seconds", "Start time of the process since unix epoch in seconds.", nil, nil),
	}
	add := func(typ prometheus.ValueType, name, help string, value func(sim.Stats) float64, extra ...string) {
		l := prometheus.Labels{}
		maps.Copy(l, labels)
		for i := 0; i+1 < len(extra); i += 2 {
			l[extra[i]] = extra[i+1]
		}
		c.readings = append(c.readings, reading{prometheus.NewDesc(name, help, nil, l), typ, value})
	}
	gauge := func(name, help string, value func(sim.Stats) float64, extra ...string) {
		add(prometheus.GaugeValue, name, help, value, extra...)
	}
	counter := func(name, help string, value func(sim.Stats) float64, extra ...string) {
		add(prometheus.CounterValue, name, help, value, extra...)
	}
	const waitingByReason = "Number of waiting requests by reason."
	gauge("vllm:num_requests_running", "Number of requests in model execution batches.", func(s sim.Stats) float64 { return float64(s.Running) })
	gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.", func(s sim.Stats) float64 { return float64(s.Waiting) })
	gauge("vllm:num_requests_waiting_by_reason", waitingByReason, func(s sim.Stats) float64 { return float64(s.Waiting) }, "reason", "capacity")
	gauge("vllm:num_requests_waiting_by_reason", waitingByReason, func(sim.Stats) float64 { return 0 }, "reason", "deferred")
	gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", sim.Stats.KVUsage)
	counter("vllm:prefix_cache_queries_total", "Prefix cache queries, in terms of number of queried tokens.", func(s sim.Stats) float64 { return float64(s.QueriedTokens) })
	counter("vllm:prefix_cache_hits_total", "Prefix cache hits, in terms of number of cached tokens.", func(s sim.Stats) float64 { return float64(s.HitTokens) })
	counter("vllm:num_preemptions_total", "Cumulative number of preemption from the engine.", func(s sim.Stats) float64 { return float64(s.Preemptions) })
	counter("vllm:prompt_tokens_total", "Number of prefill tokens processed.", func(s sim.Stats) float64 { return float64(s.PromptTokens) })
	const bySource = "Number of prompt tokens by source."
	counter("vllm:prompt_tokens_by_source_total", bySource, func(s sim.Stats) float64 { return float64(s.PromptTokens - s.CachedTokens) }, "source", "local_compute")
	counter("vllm:prompt_tokens_by_source_total", bySource, func(s sim.Stats) float64 { return float64(s.CachedTokens) }, "source", "local_cache_hit")
	counter("vllm:prompt_tokens_by_source_total", bySource, func(sim.Stats) float64 { return 0 }, "source", "external_kv_transfer")
	counter("vllm:prompt_tokens_cached_total", "Number of cached prompt tokens (local + external).", func(s sim.Stats) float64 { return float64(s.CachedTokens) })
	counter("vllm:generation_tokens_total", "Number of generation tokens processed.", func(s sim.Stats) float64 { return float64(s.GeneratedTokens) })
	return c
}

// Describe implements prometheus.Collector.
func (c *engineCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, r := range c.readings {
		ch <- r.desc
	}
	ch <- c.start
}

// Collect implements prometheus.Collector.
func (c *engineCollector) Collect(ch chan<- prometheus.Metric) {
	stats := c.server.live.stats()
	for _, r := range c.readings {
		ch <- prometheus.MustNewConstMetric(r.desc, r.typ, r.value(stats))
	}
	// The start of this server, not of the process: several in one test are several replicas.
	ch <- prometheus.MustNewConstMetric(c.start, prometheus.GaugeValue, float64(c.server.started.UnixMicro())/1e6)
}
