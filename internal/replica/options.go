package replica

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"
)

// Target is one replica of the configuration.
type Target struct {
	// URL is the replica's base URL, such as http://10.0.0.1:8000: scheme, host and port, no path.
	URL string `yaml:"url"`
	// Weight is the replica's relative capacity; 0 means 1.
	Weight float64 `yaml:"weight"`
	// Draining takes the replica out for new requests; those it has go on.
	Draining bool `yaml:"draining"`
	// APIKeyFile overrides Options.APIKeyFile for this replica.
	APIKeyFile string `yaml:"api_key_file"`
}

// MetricNames are the names under which the engine exports what the gateway reads. Empty fields mean vLLM's names, older
// spellings included.
type MetricNames struct {
	// Running is the gauge of running requests.
	Running string `yaml:"running"`
	// Waiting is the gauge of waiting requests.
	Waiting string `yaml:"waiting"`
	// KVUsage is the gauge of KV cache use, 0 to 1.
	KVUsage string `yaml:"kv_usage"`
	// CacheConfig is the gauge with the labels block_size and num_gpu_blocks.
	CacheConfig string `yaml:"cache_config"`
	// LoRA is the gauge with the labels running_lora_adapters and max_lora.
	LoRA string `yaml:"lora"`
	// PromptTokens is the counter of prompt tokens.
	PromptTokens string `yaml:"prompt_tokens"`
	// CachedTokens is the counter of those prompt tokens that came from the cache.
	CachedTokens string `yaml:"cached_tokens"`
	// GenerationTokens is the counter of generated tokens.
	GenerationTokens string `yaml:"generation_tokens"`
}

// Options configures a Fleet. The zero value is a fleet without replicas.
type Options struct {
	// Replicas is the list of replicas; it may be empty where discovery fills it.
	Replicas []Target `yaml:"replicas"`
	// HealthPath is polled for health: any 2xx is healthy, anything else is not, redirects included. Default /health.
	HealthPath string `yaml:"health_path"`
	// MetricsPath is scraped for load. Default /metrics.
	MetricsPath string `yaml:"metrics_path"`
	// Interval is the time between two polls of the same replica's health, and of its metrics. Default 1s.
	Interval time.Duration `yaml:"interval"`
	// Timeout bounds each poll. Default 2s.
	Timeout time.Duration `yaml:"timeout"`
	// ModelsInterval is the time between two readings of /v1/models. Default 10s.
	ModelsInterval time.Duration `yaml:"models_interval"`
	// UnhealthyAfter is how many polls of the health path in a row must stay without an answer before the replica is taken
	// out. A refused connection, or any answer but a 2xx, takes it out at once. Default 3.
	UnhealthyAfter int `yaml:"unhealthy_after"`
	// StaleAfter is the age from which on scraped load no longer counts. Default 5 intervals plus one timeout.
	StaleAfter time.Duration `yaml:"stale_after"`
	// EjectMin and EjectMax bound the pause after a failure seen by requests; it doubles from one to the other. Defaults
	// 1s and 30s.
	EjectMin time.Duration `yaml:"eject_min"`
	EjectMax time.Duration `yaml:"eject_max"`
	// SoftFailures is how many requests in a row must fail softly (no first byte in time, connection lost while it was in
	// use) before the replica is ejected. Default 3.
	SoftFailures int `yaml:"soft_failures"`
	// StallAfter ejects a replica that reports running requests while none of its counters of steps and tokens moves for
	// so long; for five times as long if it does not count its steps, since then a long prefill looks the same. Default
	// 60s; negative switches it off.
	StallAfter time.Duration `yaml:"stall_after"`
	// MaxScrapeBytes bounds what is read of one poll's answer. Default 8 MiB.
	MaxScrapeBytes int64 `yaml:"max_scrape_bytes"`
	// APIKeyFile holds the key that is sent as bearer token with polls; empty sends none. The key is read at start.
	APIKeyFile string `yaml:"api_key_file"`
	// MetricNames overrides the names of the engine's metrics.
	MetricNames MetricNames `yaml:"metric_names"`
}

// withDefaults returns o with every zero field replaced by its default.
func (o Options) withDefaults() Options {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	if o.HealthPath == "" {
		o.HealthPath = "/health"
	}
	if o.MetricsPath == "" {
		o.MetricsPath = "/metrics"
	}
	def(&o.Interval, time.Second)
	def(&o.Timeout, 2*time.Second)
	def(&o.ModelsInterval, 10*time.Second)
	def(&o.StaleAfter, 5*o.Interval+o.Timeout)
	def(&o.EjectMin, time.Second)
	def(&o.EjectMax, max(30*time.Second, o.EjectMin))
	def(&o.StallAfter, 60*time.Second)
	if o.UnhealthyAfter == 0 {
		o.UnhealthyAfter = 3
	}
	if o.SoftFailures == 0 {
		o.SoftFailures = 3
	}
	if o.MaxScrapeBytes == 0 {
		o.MaxScrapeBytes = 8 << 20
	}
	return o
}

// Validate returns every problem of o joined, each with its key.
func (o *Options) Validate() error {
	var errs []error
	seen := map[string]int{}
	for i, t := range o.Replicas {
		addr, err := CanonicalAddr(t.URL)
		if err != nil {
			errs = append(errs, fmt.Errorf("replicas[%d].url: %w", i, err))
		} else if j, dup := seen[addr]; dup {
			errs = append(errs, fmt.Errorf("replicas[%d].url: %s is already replicas[%d]; remove one", i, addr, j))
		} else {
			seen[addr] = i
		}
		if !(t.Weight >= 0) || t.Weight > 1e6 {
			errs = append(errs, fmt.Errorf("replicas[%d].weight: got %v, want a number from 0 to 1e6", i, t.Weight))
		}
	}
	for _, p := range []struct{ key, path string }{{"health_path", o.HealthPath}, {"metrics_path", o.MetricsPath}} {
		if p.path != "" && !strings.HasPrefix(p.path, "/") {
			errs = append(errs, fmt.Errorf("%s: got %q, want a path that starts with /", p.key, p.path))
		}
	}
	for _, d := range []struct {
		key string
		d   time.Duration
	}{
		{"interval", o.Interval},
		{"timeout", o.Timeout},
		{"models_interval", o.ModelsInterval},
		{"stale_after", o.StaleAfter},
		{"eject_min", o.EjectMin},
		{"eject_max", o.EjectMax},
	} {
		if d.d < 0 {
			errs = append(errs, fmt.Errorf("%s: got %v, want a positive duration", d.key, d.d))
		}
	}
	full := o.withDefaults()
	if full.EjectMax < full.EjectMin {
		errs = append(errs, fmt.Errorf("eject_max: got %v, want at least eject_min (%v)", full.EjectMax, full.EjectMin))
	}
	if o.UnhealthyAfter < 0 {
		errs = append(errs, fmt.Errorf("unhealthy_after: got %d, want 1 or more", o.UnhealthyAfter))
	}
	if o.SoftFailures < 0 {
		errs = append(errs, fmt.Errorf("soft_failures: got %d, want 1 or more", o.SoftFailures))
	}
	if o.MaxScrapeBytes < 0 {
		errs = append(errs, fmt.Errorf("max_scrape_bytes: got %d, want 1 or more", o.MaxScrapeBytes))
	}
	return errors.Join(errs...)
}

// CanonicalAddr brings a replica's base URL into the form of ID.Addr: lower case, with its port, without a trailing slash.
// The error does not repeat the URL where that could hold a password.
func CanonicalAddr(raw string) (string, error) {
	u, err := url.Parse(raw)
	switch {
	case err != nil:
		return "", errors.New("malformed URL; want for example http://10.0.0.1:8000")
	case u.User != nil:
		return "", errors.New("a replica's URL must not hold a user or password; use api_key_file")
	case u.Scheme != "http" && u.Scheme != "https":
		return "", fmt.Errorf("got %q, want a URL that starts with http:// or https://", raw)
	case u.Hostname() == "":
		return "", fmt.Errorf("got %q, want a host, for example http://10.0.0.1:8000", raw)
	case u.Path != "" && u.Path != "/" || u.RawQuery != "" || u.Fragment != "":
		return "", fmt.Errorf("got %q, want only scheme, host and port: drop what follows", raw)
	}
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
		return "", fmt.Errorf("got port %q, want 1 to 65535", port)
	}
	return u.Scheme + "://" + net.JoinHostPort(strings.ToLower(u.Hostname()), port), nil
}

// readKey reads an API key file; an empty path is no key.
func readKey(path string) (string, error) {
	if path == "" {
		return "", nil
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("read api_key_file: %w", err)
	}
	key := strings.TrimSpace(string(b))
	if key == "" || strings.ContainsAny(key, "\r\n") {
		return "", fmt.Errorf("api_key_file %s: want one line with the key", path)
	}
	return key, nil
}
