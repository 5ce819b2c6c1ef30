// Package testenv finds what tests need and cannot carry: the shared oracle and captures, vendors' tokenizers, a real
// redis-server. What is absent skips the test with a clear message, or fails it where CI is set, so that a green CI run
// never hides a missing set-up step. Only tests import it.
package testenv

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Root returns the absolute path of the repository: the nearest folder above the test's own that holds go.mod.
func Root() string {
	dir, err := os.Getwd()
	if err != nil {
		panic("BUG: no working directory: " + err.Error())
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			panic("BUG: tests run outside the repository")
		}
		dir = parent
	}
}

// Missing reports that a test cannot run for want of something. It fails the test in CI and skips it elsewhere.
func Missing(tb testing.TB, what string) {
	tb.Helper()
	if os.Getenv("CI") != "" {
		tb.Fatalf("%s (needed in CI)", what)
	}
	tb.Skipf("%s; skipped outside CI", what)
}

// Shared returns the absolute path of a file of the shared material (oracle, captures, traces), given relative to its
// root: the folder named by PREFIXGATE_SHARED, else ../shared beside the repository.
func Shared(tb testing.TB, name string) string {
	tb.Helper()
	root := os.Getenv("PREFIXGATE_SHARED")
	if root == "" {
		root = filepath.Join(filepath.Dir(Root()), "shared")
	}
	path := filepath.Join(root, filepath.FromSlash(name))
	if _, err := os.Stat(path); err != nil {
		Missing(tb, "no "+name+" under "+root+": set PREFIXGATE_SHARED to the folder of the shared test material")
	}
	return path
}

// Tokenizer returns the folder of a public model's tokenizer (tokenizer.json, tokenizer_config.json and, where the model
// has one, its chat template), as scripts/tokenizers.sh lays it into the ignored cache. name is that of the npm package
// without its prefix: qwen3, llama3_1, deepseek_v3, gptoss or gemma3.
func Tokenizer(tb testing.TB, name string) string {
	tb.Helper()
	dir := filepath.Join(Root(), ".cache", "tokenizers", name)
	if _, err := os.Stat(filepath.Join(dir, "tokenizer.json")); err != nil {
		Missing(tb, "no tokenizer "+name+" in the cache: run scripts/tokenizers.sh")
	}
	return dir
}

// GoModuleTokenizer returns the path of a tokenizer file among the test data of the daulet/tokenizers Go module, such as
// bert-base-uncased.json.
func GoModuleTokenizer(tb testing.TB, name string) string {
	tb.Helper()
	cmd := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/daulet/tokenizers") //nolint:noctx // a test helper; ends by itself
	cmd.Dir = Root()
	out, err := cmd.Output()
	if err != nil {
		Missing(tb, "the Go module daulet/tokenizers is not downloaded: run go mod download")
	}
	path := filepath.Join(strings.TrimSpace(string(out)), "test", "data", name)
	if _, err := os.Stat(path); err != nil {
		Missing(tb, "daulet/tokenizers carries no test data "+name)
	}
	return path
}
