package replica

import (
	"math"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// collector exports the replicas that are in the list at the time of the scrape, so that those removed leave no series.
// The label replica is the address; there are as many values as configured replicas.
type collector struct {
	fleet *Fleet

	healthy, draining, inFlight, prefillTokens, prefillRate   *prometheus.Desc
	age, fresh, running, waiting, kvUsage, blocks, fillRate   *prometheus.Desc
	weight, startTime, restarts, ejections, pollErrors, total *prometheus.Desc
}

func newCollector(f *Fleet) *collector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("prefixgate_replica_"+name, help, append([]string{"replica"}, labels...), nil)
	}
	return &collector{
		fleet:         f,
		healthy:       desc("healthy", "1 if the replica may get requests."),
		draining:      desc("draining", "1 if the replica shall get no new requests."),
		inFlight:      desc("in_flight_requests", "Requests of this gateway on the replica."),
		prefillTokens: desc("prefill_tokens", "Uncached prompt tokens of this gateway's requests that wait for their first token."),
		prefillRate:   desc("prefill_rate_tokens_per_second", "Learned prefill speed; absent while unknown."),
		age:           desc("metrics_age_seconds", "Time since the replica's metrics were read; absent if they never were."),
		fresh:         desc("metrics_fresh", "1 if the replica's metrics are recent enough to be used."),
		running:       desc("running_requests", "Running requests as the engine counts them."),
		waiting:       desc("waiting_requests", "Waiting requests as the engine counts them."),
		kvUsage:       desc("kv_usage_ratio", "Part of the KV cache in use by running requests; absent while unknown."),
		blocks:        desc("cache_blocks", "Size of the KV cache in blocks; absent while unknown."),
		fillRate:      desc("fill_blocks_per_second", "How fast the KV cache is refilled; 0 as long as nothing is replaced."),
		weight:        desc("weight_ratio", "Configured relative capacity."),
		startTime:     desc("start_time_seconds", "Start of the engine's process since the epoch; absent while unknown."),
		restarts:      desc("restarts_total", "Restarts of the engine that were seen."),
		ejections:     desc("ejections_total", "Ejections of the replica by cause.", "kind"),
		pollErrors:    desc("poll_errors_total", "Polls of the replica that failed.", "poll"),
		total:         prometheus.NewDesc("prefixgate_replicas", "Replicas in the list by state.", []string{"state"}, nil),
	}
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range [...]*prometheus.Desc{
		c.healthy, c.draining, c.inFlight, c.prefillTokens, c.prefillRate, c.age, c.fresh, c.running, c.waiting, c.kvUsage,
		c.blocks, c.fillRate, c.weight, c.startTime, c.restarts, c.ejections, c.pollErrors, c.total,
	} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	now := time.Now()
	states := map[string]float64{"healthy": 0, "unhealthy": 0, "draining": 0}
	for _, in := range c.fleet.members.Load().list {
		var s Snapshot
		in.snapshot(now, &s)
		gauge := func(d *prometheus.Desc, v float64) {
			ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, in.addr)
		}
		flag := func(d *prometheus.Desc, v bool) {
			if v {
				gauge(d, 1)
			} else {
				gauge(d, 0)
			}
		}
		switch {
		case s.Draining:
			states["draining"]++
		case s.Healthy:
			states["healthy"]++
		default:
			states["unhealthy"]++
		}
		flag(c.healthy, s.Healthy)
		flag(c.draining, s.Draining)
		gauge(c.inFlight, float64(s.InFlight))
		gauge(c.prefillTokens, float64(s.PrefillTokens))
		gauge(c.weight, s.Weight)
		flag(c.fresh, s.MetricsFresh)
		if s.PrefillRate > 0 {
			gauge(c.prefillRate, s.PrefillRate)
		}
		if s.MetricsAge > 0 {
			gauge(c.age, s.MetricsAge.Seconds())
			gauge(c.running, float64(s.Running))
			gauge(c.waiting, float64(s.Waiting))
			gauge(c.fillRate, s.FillRate)
		}
		if !math.IsNaN(s.KVUsage) {
			gauge(c.kvUsage, s.KVUsage)
		}
		if s.NumBlocks > 0 {
			gauge(c.blocks, float64(s.NumBlocks))
		}
		if s.ID.Start > 0 {
			gauge(c.startTime, float64(s.ID.Start)/1e6)
		}
		ch <- prometheus.MustNewConstMetric(c.restarts, prometheus.CounterValue, float64(in.restarts.Load()), in.addr)
		for i, kind := range failureKinds {
			ch <- prometheus.MustNewConstMetric(c.ejections, prometheus.CounterValue, float64(in.ejections[i].Load()), in.addr, string(kind))
		}
		for i, poll := range polls {
			ch <- prometheus.MustNewConstMetric(c.pollErrors, prometheus.CounterValue, float64(in.scrapeErrors[i].Load()), in.addr, poll)
		}
	}
	for state, n := range states {
		ch <- prometheus.MustNewConstMetric(c.total, prometheus.GaugeValue, n, state)
	}
}
