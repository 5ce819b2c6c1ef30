package config

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"prefixgate/internal/testenv"

	"github.com/goccy/go-yaml"
)

func TestExampleIsValid(t *testing.T) {
	c, err := Load(filepath.Join(testenv.Root(), "deployments", "gateway.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Validate(); err != nil {
		t.Errorf("Validate of the example = %v, want no error", err)
	}
	if len(c.Fleet.Replicas) != 2 || c.Server.DrainDelay != 5*time.Second || c.Models[0].Aliases[0] != "default" || c.Redis.URL == "" {
		t.Errorf("the example reads as %+v", c)
	}
}

func TestZeroConfigIsValid(t *testing.T) {
	for _, text := range []string{"", "# nothing\n", "{}\n", "server:\n"} {
		c, err := Parse([]byte(text))
		if err != nil {
			t.Errorf("Parse(%q) = %v, want no error", text, err)
			continue
		}
		if !reflect.DeepEqual(*c, Config{}) {
			t.Errorf("Parse(%q) = %+v, want the zero Config", text, *c)
		}
		if err := c.Validate(); err != nil {
			t.Errorf("Validate of %q = %v, want no error", text, err)
		}
	}
}

// Mistakes are found when the file is read, with their place, and without what stands beside them.
func TestParseIsStrict(t *testing.T) {
	for _, c := range []struct{ name, text, want string }{
		{"unknown key", "server:\n  listen: :1\n  lisen: :2\n", `3:3: unknown field "lisen"`},
		{"unknown key at the top", "servers: {}\n", `1:1: unknown field "servers"`},
		{"unknown key in a list", "models:\n- name: a\n  tokeniser: {}\n", `3:3: unknown field "tokeniser"`},
		{"key given twice", "log:\n  level: info\n  level: debug\n", `3:3: `},
		{"duration without a unit", "proxy:\n  idle_timeout: 5\n", "a duration needs a unit"},
		{"duration that is none", "proxy:\n  idle_timeout: soon\n", "a duration needs a unit"},
		{"wrong type", "server:\n  max_in_flight: many\n", "2:18: "},
		{"list for a mapping", "server: [a]\n", "1:"},
		{"not YAML", "server: [\n", "1:"},
		{"two documents", "log: {}\n---\nlog: {}\n", "more than one document"},
	} {
		_, err := Parse([]byte(c.text))
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: Parse = %v, want an error with %q", c.name, err, c.want)
		}
	}
	for _, text := range []string{
		"redis:\n  url: [canary-secret]\n", "redis:\n  url: redis://:canary-secret@h\n  urll: x\n", "server:\n  max_in_flight: canary-secret\n",
		"redis: canary-secret\n", "proxy:\n  dial_timeout: canary-secret\n", "redis:\n  url: redis://:canary-secret@h\n\tbad\n",
		"canary-secret\n", "redis:\n  url: redis://:canary-secret@h\n  url: redis://:canary-secret@h\n",
	} {
		if _, err := Parse([]byte(text)); err == nil || strings.Contains(err.Error(), "canary-secret") {
			t.Errorf("Parse(%q) = %v, want an error that quotes no value", text, err)
		}
	}
}

func TestDurations(t *testing.T) {
	c, err := Parse([]byte("server:\n  drain_delay: -1s\n  idle_timeout: \"1m30s\"\n  header_timeout: 0\nproxy:\n  idle_timeout: 0s\n"))
	if err != nil {
		t.Fatal(err)
	}
	if c.Server.DrainDelay != -time.Second || c.Server.IdleTimeout != 90*time.Second || c.Server.HeaderTimeout != 0 {
		t.Errorf("durations read as %+v", c.Server)
	}
}

// Every problem is told at once, each with its full key path.
func TestValidateTellsEverything(t *testing.T) {
	c, err := Parse([]byte(`
server:
  listen: nowhere
  max_in_flight: -1
  allow_paths: [sleep, /a%2fb]
  explain: {enabled: true}
log: {level: loud, format: xml}
models:
- name: a
  aliases: [b, a]
  block_tokens: 17
  tokenizer: {model: x, encoder: slow}
- aliases: [c]
  block_tokens: -16
  on_error: panic
  tokenizer: {}
fleet:
  replicas: [{url: "ftp://x"}, {url: "http://a:1"}, {url: "http://a:1"}]
route: {policy: fastest, least_ttft: {prefill_rate: -1}}
index: {ttl: -1s}
redis: {url: "memcached://x", url_file: y}
load_share: {interval: -1s}
proxy: {max_attempts: -1, retry_statuses: [200]}
`))
	if err != nil {
		t.Fatal(err)
	}
	err = c.Validate()
	if err == nil {
		t.Fatal("Validate = no error")
	}
	lines := strings.Split(err.Error(), "\n")
	for _, want := range []string{
		"server.listen: ", "server.max_in_flight: ", "server.allow_paths[0]: ", "server.allow_paths[1]: ", "server.explain.enabled: ",
		"log.level: ", "log.format: ", "models[0].aliases[1]: ", "models[0].block_tokens: ", "models[0].tokenizer.encoder: ",
		"models[1].name: ", "models[1].block_tokens: ", "models[1].on_error: ", "models[1].tokenizer.model: ",
		"fleet.replicas[0].url: ", "fleet.replicas[2].url: ", "route.policy: ", "route.least_ttft.prefill_rate: ", "index.ttl: ",
		"redis.url_file: ", "load_share.interval: ", "proxy.max_attempts: ", "proxy.retry_statuses: ",
	} {
		found := false
		for _, line := range lines {
			found = found || strings.HasPrefix(line, want)
		}
		if !found {
			t.Errorf("Validate tells nothing about %q; it says:\n%v", want, err)
		}
	}
}

func TestBlockTokens(t *testing.T) {
	for n, ok := range map[int]bool{0: true, 1: true, 2: true, 4: true, 8: true, 16: true, 32: true, 528: true, -1: false, -16: false, 3: false, 17: false, 1 << 20: false} {
		c := Config{Models: []Model{{BlockTokens: n}}}
		c.Models[0].Tokenizer.Model = "m"
		if err := c.Validate(); (err == nil) != ok {
			t.Errorf("block_tokens %d: Validate = %v, want valid %v", n, err, ok)
		}
	}
}

func TestSecretsRedactThemselves(t *testing.T) {
	const canary = "redis://user:canary-secret@host:6379"
	c := Config{Redis: Redis{URL: canary}}
	var log strings.Builder
	slog.New(slog.NewJSONHandler(&log, nil)).Info("x", "url", c.Redis.URL, "redis", c.Redis)
	slog.New(slog.NewTextHandler(&log, nil)).Info("x", "url", c.Redis.URL, "redis", c.Redis)
	asJSON, err := json.Marshal(c.Redis)
	if err != nil {
		t.Fatal(err)
	}
	asYAML, err := yaml.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"%v": fmt.Sprintf("%v", c), "%+v": fmt.Sprintf("%+v", c), "%#v": fmt.Sprintf("%#v", c), "String": c.Redis.URL.String(),
		"%q": fmt.Sprintf("%q", c.Redis.URL), "log": log.String(), "JSON": string(asJSON), "YAML": string(asYAML),
	} {
		if strings.Contains(text, "canary") {
			t.Errorf("%s shows the secret: %s", name, text)
		}
	}
	if got := c.Redis.URL.Reveal(); got != canary {
		t.Errorf("Reveal = %q, want %q", got, canary)
	}
	c.Redis.URL = "redis://user:canary-secret@host:port"
	if err := c.Validate(); err == nil || strings.Contains(err.Error(), "canary") {
		t.Errorf("Validate = %v, want an error without the secret", err)
	}
}

func TestRedisURLComesFromKeyFileOrEnvironment(t *testing.T) {
	file := filepath.Join(t.TempDir(), "url")
	if err := os.WriteFile(file, []byte("redis://file\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, []byte("\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	env := func(name string) string { return map[string]string{RedisURLEnv: "redis://env"}[name] }
	none := func(string) string { return "" }
	for _, c := range []struct {
		redis  Redis
		getenv func(string) string
		want   Secret
		err    string
	}{
		{Redis{URL: "redis://key"}, env, "redis://key", ""},
		{Redis{URLFile: file}, env, "redis://file", ""},
		{Redis{}, env, "redis://env", ""},
		{Redis{}, none, "", ""},
		{Redis{URLFile: file + "x"}, env, "", "redis.url_file"},
		{Redis{URLFile: empty}, env, "", "redis.url_file"},
	} {
		got, err := c.redis.Resolve(c.getenv)
		if got != c.want || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("Resolve of %+v = %q, %v, want %q, error with %q", c.redis, got.Reveal(), err, c.want.Reveal(), c.err)
		}
	}
}
