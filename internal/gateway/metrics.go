package gateway

import (
	"time"

	"prefixgate/internal/openai"
	"prefixgate/internal/proxy"
	"prefixgate/internal/route"
	"prefixgate/internal/tokenize"

	"github.com/prometheus/client_golang/prometheus"
)

// outcome says how a request ended. The set is closed: it is a metric's label. Besides those below it has the results of
// package proxy, except for "ok", which is split by the engine's status.
type outcome string

const (
	outcomeOK        outcome = "ok"         // the engine's answer, below 400, passed on to its end
	outcomeEngine4xx outcome = "engine_4xx" // the engine refused the request
	outcomeEngine5xx outcome = "engine_5xx" // the engine failed
	// outcomeIncomplete: a stream that ended in good order, but without its end mark.
	outcomeIncomplete outcome = "incomplete"
	outcomeRejected   outcome = "rejected"   // refused by the gateway: not JSON, too large, an unknown model or path
	outcomeOverloaded outcome = "overloaded" // refused by the gateway: too many under way
	outcomeLocal      outcome = "local"      // answered by the gateway itself
	outcomePanic      outcome = "panic"      // a fault of the gateway
)

// fallback says why a request was routed by load alone. The set is closed: tokenize's reasons, openai's, and those below.
type fallback string

const (
	fallbackNoTokenizer fallback = "no_tokenizer" // the model has none configured
	fallbackNotLoaded   fallback = "not_loaded"   // it is not loaded yet, or could not be
	fallbackPanic       fallback = "panic"        // it panicked
)

// recordKind is what was recorded in the index.
type recordKind string

const (
	recordPrompt recordKind = "prompt"
	recordAnswer recordKind = "answer"
)

// answerDrop says why an answer was not recorded. The set is closed.
type answerDrop string

const (
	dropQueue    answerDrop = "queue_full" // too many answers wait to be tokenized
	dropSize     answerDrop = "too_large"  // the answer, or the request, is too large to be kept
	dropShape    answerDrop = "shape"      // several choices, several prompts, or an answer that holds no text
	dropTemplate answerDrop = "template"   // the next turn's prompt would not begin with this one, or not with the answer
	dropTokens   answerDrop = "tokenizer"  // the tokenizer failed or had no time
)

// metrics are the gateway's own. Label values come from closed sets, from the configuration, or from what the fleet serves.
type metrics struct {
	requests  *prometheus.CounterVec
	seconds   *prometheus.HistogramVec
	inFlight  prometheus.Gauge
	maxFlight prometheus.Gauge
	decide    prometheus.Histogram
	decisions map[route.Reason]prometheus.Counter
	loadOnly  *prometheus.CounterVec
	attempts  *prometheus.CounterVec

	ttft          *prometheus.HistogramVec
	predictedTTFT *prometheus.HistogramVec
	ttftRatio     *prometheus.HistogramVec

	promptTokens, predictedTokens, reportedTokens, completionTokens *prometheus.CounterVec
	miscounted                                                      *prometheus.CounterVec
	cachedError                                                     *prometheus.HistogramVec
	predictions                                                     *prometheus.CounterVec

	records     map[recordKind]prometheus.Counter
	drops       map[answerDrop]prometheus.Counter
	answerBytes prometheus.Gauge

	ready      prometheus.Gauge
	modelReady *prometheus.GaugeVec
	mismatch   *prometheus.GaugeVec
	panics     prometheus.Counter
	build      *prometheus.GaugeVec
}

var (
	// ttftBuckets reach from a cached prompt on an idle replica to a long queue.
	ttftBuckets = []float64{0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2.5, 4, 6, 10, 15, 25, 40, 60, 120}
	// decideBuckets reach from ten microseconds to the budgets of the tokenizer and of Redis.
	decideBuckets = []float64{10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 100e-3, 250e-3}
	// secondsBuckets are for whole answers, generation included.
	secondsBuckets = []float64{0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1200}
	// ratioBuckets are for measured over predicted.
	ratioBuckets = []float64{0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1, 1.15, 1.4, 2, 3, 5, 10}
	// errorBuckets are for a difference in parts of the prompt, from all of it too few to all of it too many.
	errorBuckets = []float64{-0.9, -0.5, -0.25, -0.1, -0.05, -0.01, -0.0001, 0.0001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.9}
)

func newMetrics(reg prometheus.Registerer, policy string) *metrics {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "prefixgate_" + name, Help: help}, labels)
		reg.MustRegister(c)
		return c
	}
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		g := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "prefixgate_" + name, Help: help}, labels)
		reg.MustRegister(g)
		return g
	}
	histogram := func(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
		h := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "prefixgate_" + name, Help: help, Buckets: buckets}, labels)
		reg.MustRegister(h)
		return h
	}
	m := &metrics{
		requests:  counter("requests_total", "Requests by endpoint, model and how they ended.", "endpoint", "model", "outcome"),
		seconds:   histogram("request_seconds", "Time from a request's header to the end of its answer.", secondsBuckets, "endpoint"),
		inFlight:  gauge("requests_in_flight", "Requests under way.").WithLabelValues(),
		maxFlight: gauge("requests_in_flight_limit", "Requests under way beyond which new ones are refused; 0: no limit.").WithLabelValues(),
		decide: histogram("decide_seconds", "What the gateway itself adds to a request: time from its whole body to its dispatch.",
			decideBuckets).WithLabelValues().(prometheus.Histogram),
		decisions: map[route.Reason]prometheus.Counter{},
		loadOnly:  counter("load_only_total", "Requests routed by load alone, by reason.", "reason"),
		attempts:  counter("attempts_total", "Attempts on replicas by how they ended.", "result"),

		ttft:          histogram("ttft_seconds", "Measured time from dispatch to the first token of streamed answers.", ttftBuckets, "replica"),
		predictedTTFT: histogram("predicted_ttft_seconds", "Predicted time to first token of the same requests.", ttftBuckets, "replica"),
		ttftRatio:     histogram("ttft_prediction_ratio", "Measured time to first token in parts of the predicted one.", ratioBuckets, "replica"),

		promptTokens:     counter("prompt_tokens_total", "Prompt tokens of answered requests, as tokenized here.", "replica"),
		predictedTokens:  counter("predicted_cached_tokens_total", "Of those, tokens that the replica was predicted to hold.", "replica"),
		reportedTokens:   counter("reported_cached_tokens_total", "Tokens that engines reported as cached, of requests with a prediction.", "replica"),
		completionTokens: counter("completion_tokens_total", "Generated tokens as engines reported them.", "replica"),
		miscounted: counter("prompt_tokens_mismatches_total",
			"Answers whose engine counted other prompt tokens than were tokenized here: anything but 0 means a wrong tokenizer or template.", "replica"),
		cachedError: histogram("cached_tokens_error_ratio", "Reported minus predicted cached tokens in parts of the prompt.",
			errorBuckets, "replica"),
		predictions: counter("cached_tokens_predictions_total", "Predictions of cached tokens against what the engine reported.", "result"),

		records:     map[recordKind]prometheus.Counter{},
		drops:       map[answerDrop]prometheus.Counter{},
		answerBytes: gauge("answers_queued_bytes", "Memory held by answers that wait to be tokenized and recorded.").WithLabelValues(),

		ready:      gauge("ready", "1 while /readyz answers 200.").WithLabelValues(),
		modelReady: gauge("model_ready", "1 once the tokenizer of a configured model is loaded.", "model"),
		mismatch: gauge("block_size_mismatch", "1 for a replica whose block size differs from its model's block_tokens in the configuration.",
			"replica"),
		panics: counter("panics_total", "Faults of the gateway that were caught.").WithLabelValues(),
		build:  gauge("build_info", "Always 1; the labels tell the version.", "version", "go_version"),
	}
	decisions := counter("decisions_total", "Routing decisions by policy and reason.", "policy", "reason")
	for _, r := range []route.Reason{
		route.ReasonPrefix, route.ReasonLoad, route.ReasonSpread, route.ReasonCold, route.ReasonSession, route.ReasonHash,
		route.ReasonAdapter, route.ReasonRotation, route.ReasonProbe, route.ReasonOnly, route.ReasonSaturated,
	} {
		m.decisions[r] = decisions.WithLabelValues(policy, string(r))
	}
	records := counter("records_total", "Chains of blocks recorded in the index, by what they were made from.", "kind")
	for _, k := range []recordKind{recordPrompt, recordAnswer} {
		m.records[k] = records.WithLabelValues(string(k))
	}
	drops := counter("answers_dropped_total", "Answers whose blocks were not recorded, by reason.", "reason")
	for _, d := range []answerDrop{dropQueue, dropSize, dropShape, dropTemplate, dropTokens} {
		m.drops[d] = drops.WithLabelValues(string(d))
	}
	for _, r := range proxy.Results() {
		m.attempts.WithLabelValues(string(r))
	}
	for _, r := range []fallback{
		fallbackNoTokenizer, fallbackNotLoaded, fallbackPanic,
		fallback(openai.ReasonEndpoint), fallback(openai.ReasonNoPrompt), fallback(openai.ReasonSurrogate),
		fallback(tokenize.ReasonTimeout), fallback(tokenize.ReasonTemplate), fallback(tokenize.ReasonEncoder),
	} {
		m.loadOnly.WithLabelValues(string(r))
	}
	for _, r := range []string{predictionEqual, predictionLess, predictionMore} {
		m.predictions.WithLabelValues(r)
	}
	return m
}

// The values of the label result of cached_tokens_predictions_total.
const (
	predictionEqual = "equal" // the engine reported what was predicted
	predictionLess  = "less"  // the engine found less
	predictionMore  = "more"  // the engine found more
)

// forget drops the series of a replica that was removed.
func (m *metrics) forget(addr string) {
	labels := prometheus.Labels{"replica": addr}
	for _, v := range []interface {
		DeletePartialMatch(prometheus.Labels) int
	}{
		m.ttft, m.predictedTTFT, m.ttftRatio, m.promptTokens, m.predictedTokens, m.reportedTokens, m.completionTokens,
		m.cachedError, m.miscounted, m.mismatch,
	} {
		v.DeletePartialMatch(labels)
	}
}

// predicted compares a prediction of cached tokens with the engine's report.
func (m *metrics) predicted(addr string, prompt, predicted, reported int) {
	m.promptTokens.WithLabelValues(addr).Add(float64(prompt))
	m.predictedTokens.WithLabelValues(addr).Add(float64(predicted))
	m.reportedTokens.WithLabelValues(addr).Add(float64(reported))
	if prompt > 0 {
		m.cachedError.WithLabelValues(addr).Observe(float64(reported-predicted) / float64(prompt))
	}
	switch {
	case reported == predicted:
		m.predictions.WithLabelValues(predictionEqual).Inc()
	case reported < predicted:
		m.predictions.WithLabelValues(predictionLess).Inc()
	default:
		m.predictions.WithLabelValues(predictionMore).Inc()
	}
}

// firstToken compares a predicted time to first token with the measured one. predicted is 0 if there is no prediction.
func (m *metrics) firstToken(addr string, predicted, measured time.Duration) {
	m.ttft.WithLabelValues(addr).Observe(measured.Seconds())
	if predicted > 0 {
		m.predictedTTFT.WithLabelValues(addr).Observe(predicted.Seconds())
		m.ttftRatio.WithLabelValues(addr).Observe(measured.Seconds() / predicted.Seconds())
	}
}
