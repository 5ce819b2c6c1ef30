package main

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// summary is what one half of the demonstration comes to.
type summary struct {
	policy           string
	requests, failed int
	took             time.Duration
	hitRate          float64
	mean, p50, p99   time.Duration
	// computed is the number of prompt tokens that replicas had to compute.
	computed int
	// requestLoad and computedLoad are the busiest replica's share over the mean, in requests and in computed tokens.
	requestLoad, computedLoad float64
	// agree is the part of requests whose cached tokens the gateway predicted exactly, counted that with the exact number of prompt
	// tokens; told how many it said anything about.
	agree, counted float64
	told           int
	firstError     error
}

// summarize sums up results over so many replicas.
func summarize(policy string, results []result, replicas int, took time.Duration) summary {
	s := summary{policy: policy, requests: len(results), took: took}
	var prompt, cached, agree, counted int
	var ttfts []time.Duration
	var total time.Duration
	requests := map[string]float64{}
	computed := map[string]float64{}
	for _, r := range results {
		if r.err != nil {
			s.failed++
			if s.firstError == nil {
				s.firstError = r.err
			}
			continue
		}
		prompt += r.prompt
		cached += r.cached
		ttfts = append(ttfts, r.ttft)
		total += r.ttft
		requests[r.replica]++
		computed[r.replica] += float64(r.prompt - r.cached)
		if r.predicted >= 0 {
			s.told++
			if r.predicted == r.cached {
				agree++
			}
			if r.counted == r.prompt {
				counted++
			}
		}
	}
	s.computed = prompt - cached
	if n := len(ttfts); n > 0 {
		slices.Sort(ttfts)
		s.mean = total / time.Duration(n)
		s.p50, s.p99 = quantile(ttfts, 0.5), quantile(ttfts, 0.99)
	}
	s.hitRate = ratio(cached, prompt)
	s.agree, s.counted = ratio(agree, s.told), ratio(counted, s.told)
	s.requestLoad, s.computedLoad = imbalance(requests, replicas), imbalance(computed, replicas)
	return s
}

// quantile returns the smallest value that at least the part q of sorted values does not exceed.
func quantile(sorted []time.Duration, q float64) time.Duration {
	i := int(q*float64(len(sorted))+0.999999) - 1
	return sorted[min(max(i, 0), len(sorted)-1)]
}

func ratio(a, b int) float64 {
	if b == 0 {
		return 0
	}
	return float64(a) / float64(b)
}

// imbalance is the largest value over the mean, replicas without any counted as 0.
func imbalance(values map[string]float64, n int) float64 {
	sum, most := 0.0, 0.0
	for _, v := range values {
		sum += v
		most = max(most, v)
	}
	if sum == 0 {
		return 0
	}
	return most * float64(max(n, len(values))) / sum
}

// problems says why the demonstration did not show what it is for; nil if it did.
func problems(before, after summary) []string {
	var out []string
	for _, s := range []summary{before, after} {
		if s.failed > 0 {
			out = append(out, fmt.Sprintf("%s: %d of %d requests failed, the first with: %v", s.policy, s.failed, s.requests, s.firstError))
		}
		if s.requests == 0 {
			out = append(out, s.policy+": no request was made")
		}
		if s.requests-s.failed != s.told {
			out = append(out, fmt.Sprintf("%s: the gateway told its decision for only %d of %d requests", s.policy, s.told, s.requests-s.failed))
		}
	}
	if after.hitRate <= before.hitRate {
		out = append(out, fmt.Sprintf("the cache hit rate did not rise: %s against %s", percent(after.hitRate), percent(before.hitRate)))
	}
	if after.mean >= before.mean {
		out = append(out, fmt.Sprintf("the mean time to first token did not fall: %s against %s", millis(after.mean), millis(before.mean)))
	}
	return out
}

func percent(f float64) string       { return fmt.Sprintf("%.1f %%", 100*f) }
func millis(d time.Duration) string  { return fmt.Sprintf("%d ms", d.Milliseconds()) }
func seconds(d time.Duration) string { return fmt.Sprintf("%.1f s", d.Seconds()) }

// thousands writes a number with commas.
func thousands(n int) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// times writes how much smaller, or larger, after is than before.
func times(before, after float64) string {
	switch {
	case before <= 0 || after <= 0:
		return ""
	case after > before:
		return fmt.Sprintf("%.1fx more", after/before)
	}
	return fmt.Sprintf("%.1fx less", before/after)
}

// table prints both halves side by side.
func table(w io.Writer, before, after summary) {
	row := func(name, a, b, change string) {
		fmt.Fprintln(w, strings.TrimRight(fmt.Sprintf("%-30s %12s %12s   %s", name, a, b, change), " "))
	}
	duration := func(name string, a, b time.Duration) { row(name, millis(a), millis(b), times(float64(a), float64(b))) }
	share := func(name string, a, b float64) { row(name, fmt.Sprintf("%.2f", a), fmt.Sprintf("%.2f", b), "") }
	row("", before.policy, after.policy, "")
	row("cache hit rate", percent(before.hitRate), percent(after.hitRate), fmt.Sprintf("%+.1f points", 100*(after.hitRate-before.hitRate)))
	row("prompt tokens computed", thousands(before.computed), thousands(after.computed), times(float64(before.computed), float64(after.computed)))
	duration("time to first token, mean", before.mean, after.mean)
	duration("                     p50", before.p50, after.p50)
	duration("                     p99", before.p99, after.p99)
	share("load max/mean, requests", before.requestLoad, after.requestLoad)
	share("load max/mean, computed tokens", before.computedLoad, after.computedLoad)
	row("prompt tokens counted exactly", percent(before.counted), percent(after.counted), "")
	row("cached tokens predicted right", percent(before.agree), percent(after.agree), "")
	row("requests", fmt.Sprint(before.requests), fmt.Sprint(after.requests), "")
	row("the whole took", seconds(before.took), seconds(after.took), times(float64(before.took), float64(after.took)))
}
