// Package config reads the gateway's configuration.
//
// In go a YAML file and what the command line adds; out comes one tree, composed of the Options of every package, checked
// as a whole. Decoding is strict: an unknown key, a key given twice or a duration without a unit is an error that names the
// line. Validate finds every problem at once, each with its full key path. The zero Config works, but for a fleet, which a
// gateway needs to be of use.
//
// The package opens nothing but the files it is told of, and never shows a secret: those come from files or the environment
// and are of type Secret, which redacts itself.
package config

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"prefixgate/internal/index"
	"prefixgate/internal/proxy"
	"prefixgate/internal/replica"
	"prefixgate/internal/route"
	"prefixgate/internal/tokenize"
)

// RedisURLEnv is the environment variable that holds the URL of Redis where neither url nor url_file is set.
const RedisURLEnv = "PREFIXGATE_REDIS_URL"

// Config is everything that can be set. Each key is documented in docs/configuration.md, which a test compares with it.
type Config struct {
	// Server is how clients and operators reach the gateway, and what it takes from them.
	Server Server `yaml:"server"`
	// Log is what is written to standard error.
	Log Log `yaml:"log"`
	// Models are the models whose prompts are tokenized. A model that is served but not listed is routed by load.
	Models []Model `yaml:"models"`
	// Fleet is the replicas.
	Fleet replica.Options `yaml:"fleet"`
	// Route is the policy by which a replica is chosen.
	Route route.Options `yaml:"route"`
	// Index is the memory of who holds which prefix.
	Index index.Options `yaml:"index"`
	// Redis is what several gateways share; without it the index is in the process.
	Redis Redis `yaml:"redis"`
	// LoadShare is how gateways tell each other what they have in flight; it needs Redis.
	LoadShare index.LoadOptions `yaml:"load_share"`
	// Proxy is how requests are forwarded.
	Proxy proxy.Options `yaml:"proxy"`
}

// Server is how the gateway is reached. The zero value listens on :8080, metrics included.
type Server struct {
	// Listen is the address for clients, host:port or :port. Default :8080.
	Listen string `yaml:"listen"`
	// AdminListen, if set, is another address for /metrics, /livez, /readyz and /v1/explain; /metrics is then not served to
	// clients. Default: none, all on Listen.
	AdminListen string `yaml:"admin_listen"`
	// H2C also speaks HTTP/2 without TLS, to clients that begin with it. Default false.
	H2C bool `yaml:"h2c"`
	// MaxBodyBytes bounds a request's body, before and after decompression. Default 64 MiB.
	MaxBodyBytes int64 `yaml:"max_body_bytes"`
	// MaxHeaderBytes bounds a request's header. Default 64 KiB.
	MaxHeaderBytes int `yaml:"max_header_bytes"`
	// MaxInFlight is the number of requests under way beyond which new ones get a 429. Default 0: no limit.
	MaxInFlight int `yaml:"max_in_flight"`
	// HeaderTimeout is how long a client may take to send a request's header. Default 10s.
	HeaderTimeout time.Duration `yaml:"header_timeout"`
	// BodyTimeout is how long a client may take to send a body, on top of what BodyMinRate allows. Default 30s.
	BodyTimeout time.Duration `yaml:"body_timeout"`
	// BodyMinRate is the rate in bytes per second at which a body must come in the long run. Default 16384.
	BodyMinRate int64 `yaml:"body_min_rate"`
	// IdleTimeout is how long an unused connection of a client is kept. Default 2m.
	IdleTimeout time.Duration `yaml:"idle_timeout"`
	// StartupTimeout is how long the gateway waits for a first healthy replica before it calls itself ready all the same.
	// Default 10s.
	StartupTimeout time.Duration `yaml:"startup_timeout"`
	// DrainDelay is how long new requests are still served after readiness has begun to fail, so that load balancers
	// notice. Default 5s; below 0 none.
	DrainDelay time.Duration `yaml:"drain_delay"`
	// DrainTimeout is how long requests under way may go on after that, before they are broken off. Default 5m; below 0
	// none.
	DrainTimeout time.Duration `yaml:"drain_timeout"`
	// DebugHeaders shows the decision in the headers of the answer to a request that has the header x-prefixgate-debug: 1.
	// Whoever may ask learns what others have cached. Default false.
	DebugHeaders bool `yaml:"debug_headers"`
	// AllowPaths are more paths to be served, besides /v1/ and the engine's inference endpoints: exact ones, also those of
	// the engine's administration. Default none.
	AllowPaths []string `yaml:"allow_paths"`
	// Explain is POST /v1/explain.
	Explain Explain `yaml:"explain"`
}

// Explain guards POST /v1/explain, which tells what would be chosen for a request and why.
type Explain struct {
	// Enabled turns it on. It then needs AdminListen, a TokenFile, or both. Default false.
	Enabled bool `yaml:"enabled"`
	// TokenFile holds the bearer token that callers must present. Default none.
	TokenFile string `yaml:"token_file"`
}

// Log is what is logged. The zero value logs from level info on, as JSON.
type Log struct {
	// Level is debug, info, warn or error. Default info. No level shows prompts, tokens or keys.
	Level string `yaml:"level"`
	// Format is json or text. Default json.
	Format string `yaml:"format"`
	// Access writes a line for each request. Default true.
	Access *bool `yaml:"access"`
}

// Model is a model whose prompts the gateway tokenizes.
type Model struct {
	// Name is the model as the replicas serve it (an id of their /v1/models). Its adapters need no entry. Default: if this
	// is the only model, every model that the replicas serve; else Tokenizer.Model.
	Name string `yaml:"name"`
	// Aliases are other names that clients may use for it; replicas get Name. Default none.
	Aliases []string `yaml:"aliases"`
	// BlockTokens is the block size in tokens of replicas that do not tell theirs. Where a replica tells another, that one
	// is used and a metric shows the difference. Default: what the model's other replicas tell, else 16.
	BlockTokens int `yaml:"block_tokens"`
	// OnError is what happens if the tokenizer cannot be loaded: fail ends the gateway with an error, load-only routes the
	// model by load. Default fail.
	OnError string `yaml:"on_error"`
	// Tokenizer is where token ids come from.
	Tokenizer tokenize.Options `yaml:"tokenizer"`
}

// Redis is where gateways share what they know. The zero value is none.
type Redis struct {
	// URL is redis://, rediss://, unix://, redis-sentinel:// or redis-cluster://. A URL with a password belongs into a file.
	// Default none: the index is in the process.
	URL Secret `yaml:"url"`
	// URLFile is a file that holds the URL. Default none. Without both, the environment's PREFIXGATE_REDIS_URL counts.
	URLFile string `yaml:"url_file"`
}

// The values of Model.OnError.
const (
	OnErrorFail     = "fail"
	OnErrorLoadOnly = "load-only"
)

// DefaultBlockTokens is the block size where nothing tells another.
const DefaultBlockTokens = 16

// Resolve returns the URL of Redis, from the key, the file or the environment; empty means none.
func (r Redis) Resolve(getenv func(string) string) (Secret, error) {
	switch {
	case r.URL != "":
		return r.URL, nil
	case r.URLFile != "":
		b, err := os.ReadFile(r.URLFile)
		if err != nil {
			return "", fmt.Errorf("redis.url_file: %w", err)
		}
		url := strings.TrimSpace(string(b))
		if url == "" {
			return "", fmt.Errorf("redis.url_file: %s is empty: put the URL of Redis into it", r.URLFile)
		}
		return Secret(url), nil
	}
	return Secret(getenv(RedisURLEnv)), nil
}

// WithDefaults returns s with every zero field replaced by its default.
func (s Server) WithDefaults() Server {
	set(&s.Listen, ":8080")
	set(&s.MaxBodyBytes, 64<<20)
	set(&s.MaxHeaderBytes, 64<<10)
	set(&s.HeaderTimeout, 10*time.Second)
	set(&s.BodyTimeout, 30*time.Second)
	set(&s.BodyMinRate, 16<<10)
	set(&s.IdleTimeout, 2*time.Minute)
	set(&s.StartupTimeout, 10*time.Second)
	set(&s.DrainDelay, 5*time.Second)
	set(&s.DrainTimeout, 5*time.Minute)
	s.DrainDelay, s.DrainTimeout = max(0, s.DrainDelay), max(0, s.DrainTimeout)
	return s
}

func set[T comparable](v *T, def T) {
	var zero T
	if *v == zero {
		*v = def
	}
}

// Validate returns every problem of the configuration, joined, each with its full key path. It reads no file.
func (c *Config) Validate() error {
	var errs []error
	errs = append(errs, under("server", c.Server.validate())...)
	errs = append(errs, under("log", c.Log.validate())...)
	errs = append(errs, validateModels(c.Models)...)
	errs = append(errs, under("fleet", c.Fleet.Validate())...)
	errs = append(errs, under("route", c.Route.Validate())...)
	errs = append(errs, under("index", c.Index.Validate())...)
	errs = append(errs, under("redis", c.Redis.validate())...)
	errs = append(errs, under("load_share", c.LoadShare.Validate())...)
	errs = append(errs, under("proxy", c.Proxy.Validate())...)
	return errors.Join(errs...)
}

func (s Server) validate() error {
	var errs []error
	add := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	address := func(key, addr string) {
		if addr == "" {
			return
		}
		_, port, err := net.SplitHostPort(addr)
		if err != nil {
			add("%s: got %q, want host:port or :port", key, addr)
		} else if n, err := strconv.Atoi(port); err != nil || n < 0 || n > 65535 {
			add("%s: got port %q, want 0 to 65535", key, port)
		}
	}
	address("listen", s.Listen)
	address("admin_listen", s.AdminListen)
	for _, n := range []struct {
		key string
		v   int64
	}{
		{"max_body_bytes", s.MaxBodyBytes},
		{"max_header_bytes", int64(s.MaxHeaderBytes)},
		{"max_in_flight", int64(s.MaxInFlight)},
		{"body_min_rate", s.BodyMinRate},
	} {
		if n.v < 0 {
			add("%s: got %d, want 0 (the default) or more", n.key, n.v)
		}
	}
	for _, d := range []struct {
		key string
		v   time.Duration
	}{
		{"header_timeout", s.HeaderTimeout},
		{"body_timeout", s.BodyTimeout},
		{"idle_timeout", s.IdleTimeout},
		{"startup_timeout", s.StartupTimeout},
	} {
		if d.v < 0 {
			add("%s: got %v, want 0 (the default) or a positive duration", d.key, d.v)
		}
	}
	for i, p := range s.AllowPaths {
		if !strings.HasPrefix(p, "/") || strings.ContainsAny(p, "%?#*") {
			add("allow_paths[%d]: got %q, want an exact path that starts with /, without escapes or wildcards", i, p)
		}
	}
	if s.Explain.Enabled && s.Explain.TokenFile == "" && s.AdminListen == "" {
		add("explain.enabled: it tells what is cached where: set explain.token_file, or server.admin_listen to serve it there only")
	}
	return errors.Join(errs...)
}

func (l Log) validate() error {
	var errs []error
	switch l.Level {
	case "", "debug", "info", "warn", "error":
	default:
		errs = append(errs, fmt.Errorf("level: got %q, want debug, info, warn or error", l.Level))
	}
	switch l.Format {
	case "", "json", "text":
	default:
		errs = append(errs, fmt.Errorf("format: got %q, want json or text", l.Format))
	}
	return errors.Join(errs...)
}

func (r Redis) validate() error {
	if r.URL != "" && r.URLFile != "" {
		return errors.New("url_file: url is set too: keep one of them")
	}
	if r.URL != "" {
		if _, err := index.ParseURL(r.URL.Reveal()); err != nil {
			return fmt.Errorf("url: %w", err)
		}
	}
	return nil
}

func validateModels(models []Model) []error {
	var errs []error
	names := map[string]string{}
	name := func(key, name string) {
		if name == "" {
			return
		}
		if before, ok := names[name]; ok {
			errs = append(errs, fmt.Errorf("%s: %q is already %s: a name can stand for one model only", key, name, before))
			return
		}
		names[name] = key
	}
	for i := range models {
		m := &models[i]
		key := fmt.Sprintf("models[%d]", i)
		if m.Name == "" && len(models) > 1 {
			name(key+".name (from tokenizer.model)", m.Tokenizer.Model)
		} else {
			name(key+".name", m.Name)
		}
		for j, alias := range m.Aliases {
			aliasKey := fmt.Sprintf("%s.aliases[%d]", key, j)
			if alias == "" {
				errs = append(errs, fmt.Errorf("%s: it is empty: remove it", aliasKey))
			}
			name(aliasKey, alias)
		}
		if len(m.Aliases) > 0 && m.Name == "" {
			errs = append(errs, fmt.Errorf("%s.name: it is missing: aliases need the name that replicas know", key))
		}
		if n := m.BlockTokens; n < 0 || n > 1<<16 || n > 4 && n%8 != 0 || n == 3 {
			errs = append(errs, fmt.Errorf("%s.block_tokens: got %d, want the engine's block size: 1, 2, 4 or a multiple of 8, or 0 to take what replicas tell", key, n))
		}
		switch m.OnError {
		case "", OnErrorFail, OnErrorLoadOnly:
		default:
			errs = append(errs, fmt.Errorf("%s.on_error: got %q, want %s or %s", key, m.OnError, OnErrorFail, OnErrorLoadOnly))
		}
		errs = append(errs, under(key+".tokenizer", m.Tokenizer.Validate())...)
	}
	return errs
}

// under puts a key before each of the errors that are joined in err.
func under(key string, err error) []error {
	if err == nil {
		return nil
	}
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return []error{fmt.Errorf("%s.%w", key, err)}
	}
	var errs []error
	for _, e := range joined.Unwrap() {
		errs = append(errs, under(key, e)...)
	}
	return errs
}
