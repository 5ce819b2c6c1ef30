package tokenize

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are the package's collectors, bound to one model. Several models, and a model loaded anew, share the registry: the
// collectors are registered once and used again, and gauges move by differences, so that an old model's end takes nothing
// from a new one of the same name.
type metrics struct {
	info          *prometheus.GaugeVec
	cuts          *prometheus.GaugeVec
	encodeSeconds prometheus.Observer
	cachedBytes   prometheus.Counter
	encodedBytes  prometheus.Counter
	chunkCache    cacheMetrics
	mismatches    prometheus.Counter
	unsupported   *prometheus.CounterVec
	workers       prometheus.Gauge
	busy          prometheus.Gauge
	remote        *prometheus.CounterVec
	remoteSeconds prometheus.Observer
	remoteCache   cacheMetrics
	selfCheck     *prometheus.GaugeVec
	loadSeconds   prometheus.Gauge

	model string
}

func newMetrics(reg prometheus.Registerer, model string) *metrics {
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		return register(reg, prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "prefixgate_tokenizer_" + name, Help: help}, append([]string{"model"}, labels...)))
	}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return register(reg, prometheus.NewCounterVec(prometheus.CounterOpts{Name: "prefixgate_tokenizer_" + name, Help: help}, append([]string{"model"}, labels...)))
	}
	histogram := func(name, help string, buckets []float64) *prometheus.HistogramVec {
		return register(reg, prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "prefixgate_tokenizer_" + name, Help: help, Buckets: buckets}, []string{"model"}))
	}
	text := counter("text_bytes_total", "Bytes of text turned into token ids, by where the ids came from: the chunk cache or the encoder.", "source")
	return &metrics{
		model: model,
		info:  gauge("info", "1 for the way in which a loaded model's token ids are found: encoder is huggingface, fastokens or none; chat and completions are local, remote or off.", "encoder", "chat", "completions"),
		cuts:  gauge("cut_kinds", "1 for each kind of place at which the chunk cache may cut a loaded model's text; 0 where it was not proved exact and is off.", "kind"),
		encodeSeconds: histogram("encode_seconds", "Seconds from a request to its token ids, chat template and waiting included; requests without ids too.",
			[]float64{5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5}).WithLabelValues(model),
		cachedBytes:  text.WithLabelValues(model, "cache"),
		encodedBytes: text.WithLabelValues(model, "encoder"),
		chunkCache: cacheMetrics{
			bytes:   gauge("cache_bytes", "Bytes of memory that the chunk cache uses.").WithLabelValues(model),
			limit:   gauge("cache_max_bytes", "Bytes of memory that the chunk cache may use.").WithLabelValues(model),
			entries: gauge("cache_entries", "Chunks in the chunk cache.").WithLabelValues(model),
			evicted: counter("cache_evictions_total", "Chunks dropped from the chunk cache to stay within its memory.").WithLabelValues(model),
		},
		mismatches:    counter("chunk_mismatches_total", "Chunks whose end did not encode as it was proved to: the text was encoded whole instead. Anything but 0 is a fault to report.").WithLabelValues(model),
		unsupported:   counter("unsupported_total", "Requests without token ids, routed by load alone, by reason.", "reason"),
		workers:       gauge("workers", "Threads that encode new text.").WithLabelValues(model),
		busy:          gauge("workers_busy", "Threads that are encoding new text now.").WithLabelValues(model),
		remote:        counter("remote_requests_total", "Calls of the replicas' /tokenize, by outcome; cached ones were answered from memory.", "outcome"),
		remoteSeconds: histogram("remote_seconds", "Seconds that a call of a replica's /tokenize took.", []float64{0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1}).WithLabelValues(model),
		remoteCache: cacheMetrics{
			bytes:   gauge("remote_cache_bytes", "Bytes of memory that answers of the replicas' /tokenize use.").WithLabelValues(model),
			limit:   gauge("remote_cache_max_bytes", "Bytes of memory that answers of the replicas' /tokenize may use.").WithLabelValues(model),
			entries: gauge("remote_cache_entries", "Answers of the replicas' /tokenize in memory.").WithLabelValues(model),
			evicted: counter("remote_cache_evictions_total", "Answers of the replicas' /tokenize dropped to stay within their memory.").WithLabelValues(model),
		},
		selfCheck:   gauge("self_check", "Prompts of the last self-check against a replica's /tokenize, by result.", "result"),
		loadSeconds: gauge("load_seconds", "Seconds that loading and proving the tokenizer took.").WithLabelValues(model),
	}
}

// refused counts a request without token ids.
func (m *metrics) refused(reason Reason) {
	m.unsupported.WithLabelValues(m.model, string(reason)).Inc()
}

// register registers c, or returns the collector of the same name that is registered already.
func register[C prometheus.Collector](reg prometheus.Registerer, c C) C {
	if reg == nil {
		return c
	}
	err := reg.Register(c)
	if already, ok := errors.AsType[prometheus.AlreadyRegisteredError](err); ok {
		if old, ok := already.ExistingCollector.(C); ok {
			return old
		}
	}
	if err != nil {
		panic("BUG: metric cannot be registered: " + err.Error())
	}
	return c
}
