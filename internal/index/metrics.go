package index

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// result says where a lookup's answer came from. The set is closed: it is a metric's label.
type result uint8

const (
	resultMemory  result = iota // the embedded index; there is no Redis
	resultNear                  // the near cache was fresh enough
	resultOne                   // one round trip
	resultTwo                   // two round trips
	resultPartial               // Redis answered for some keys only; stale entries filled in
	resultFailed                // Redis did not answer; stale entries and own records did
	resultSkipped               // Redis is being left alone; the same
	results
)

var resultNames = [results]string{"memory", "near", "redis_1", "redis_2", "partial", "failed", "skipped"}

// drop says why a record did not reach Redis.
type drop uint8

const (
	dropFull    drop = iota // the queue is full
	dropAway                // Redis is being left alone
	dropRefused             // Redis refuses writes: full, read-only, loading
	dropFailed              // the write failed
	drops
)

var dropNames = [drops]string{"queue_full", "redis_away", "refused", "failed"}

type metrics struct {
	lookups  [results]prometheus.Counter
	records  prometheus.Counter
	forgets  prometheus.Counter
	dropped  [drops]prometheus.Counter
	keys     prometheus.Counter
	written  prometheus.Counter
	errs     [failures]prometheus.Counter
	up       prometheus.Gauge
	seconds  prometheus.Histogram
	writeSec prometheus.Histogram
}

func newMetrics(reg prometheus.Registerer) *metrics {
	f := promauto.With(reg)
	m := &metrics{
		records: f.NewCounter(prometheus.CounterOpts{
			Name: "prefixgate_index_records_total",
			Help: "Chains recorded: a replica was credited with a prompt's blocks.",
		}),
		forgets: f.NewCounter(prometheus.CounterOpts{
			Name: "prefixgate_index_forgets_total",
			Help: "Times that all recorded of a replica was given up.",
		}),
	}
	lookups := f.NewCounterVec(prometheus.CounterOpts{
		Name: "prefixgate_index_lookups_total",
		Help: "Lookups by where the answer came from: memory (no Redis configured), near (fresh near cache), redis_1 and redis_2 " +
			"(one and two round trips), partial, failed (Redis gave some or no answer in time), skipped (Redis is being left alone).",
	}, []string{"result"})
	for i := range m.lookups {
		m.lookups[i] = lookups.WithLabelValues(resultNames[i])
	}
	return m
}

// withRedis adds what only an index on Redis reports.
func (m *metrics) withRedis(reg prometheus.Registerer) {
	f := promauto.With(reg)
	m.keys = f.NewCounter(prometheus.CounterOpts{
		Name: "prefixgate_index_redis_keys_read_total",
		Help: "Keys asked of Redis by lookups.",
	})
	m.written = f.NewCounter(prometheus.CounterOpts{
		Name: "prefixgate_index_redis_keys_written_total",
		Help: "Keys written to Redis by records.",
	})
	m.up = f.NewGauge(prometheus.GaugeOpts{
		Name: "prefixgate_redis_up",
		Help: "1 while Redis is used for lookups; 0 while it is left alone because it failed.",
	})
	m.seconds = f.NewHistogram(prometheus.HistogramOpts{
		Name:    "prefixgate_index_redis_lookup_seconds",
		Help:    "Time of lookups that asked Redis, in seconds.",
		Buckets: []float64{.0001, .0002, .0004, .0007, .001, .0015, .002, .003, .005, .01, .025},
	})
	m.writeSec = f.NewHistogram(prometheus.HistogramOpts{
		Name:    "prefixgate_index_redis_write_seconds",
		Help:    "Time to write one batch of records to Redis, in seconds. No request waits for it.",
		Buckets: []float64{.0005, .001, .002, .005, .01, .025, .05, .1, .25, .5},
	})
	dropped := f.NewCounterVec(prometheus.CounterOpts{
		Name: "prefixgate_index_records_dropped_total",
		Help: "Records that did not reach Redis, by reason. They are in this gateway's memory and are written when touched again.",
	}, []string{"reason"})
	for i := range m.dropped {
		m.dropped[i] = dropped.WithLabelValues(dropNames[i])
	}
	errs := f.NewCounterVec(prometheus.CounterOpts{
		Name: "prefixgate_redis_errors_total",
		Help: "Errors of Redis by kind.",
	}, []string{"kind"})
	for i := range m.errs {
		m.errs[i] = errs.WithLabelValues(failureNames[i])
	}
}

// observe reports the size of a store.
func (m *metrics) observe(reg prometheus.Registerer, store string, bytes, runs *atomic.Int64, maxBytes int64) {
	f := promauto.With(reg)
	labels := prometheus.Labels{"store": store}
	f.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "prefixgate_index_bytes", Help: "Bytes of memory in use by the index's stores.", ConstLabels: labels,
	}, func() float64 { return float64(bytes.Load()) })
	f.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "prefixgate_index_max_bytes", Help: "Bytes of memory that the index's stores may use.", ConstLabels: labels,
	}, func() float64 { return float64(maxBytes) })
	f.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "prefixgate_index_runs", Help: "Runs of blocks in the index's stores.", ConstLabels: labels,
	}, func() float64 { return float64(runs.Load()) })
}
