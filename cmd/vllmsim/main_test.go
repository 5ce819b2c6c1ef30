package main

import (
	"bufio"
	"context"
	"io"
	"net/http"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"prefixgate/internal/testenv"
)

// start runs the program with args until the test ends and returns its base URL and what it returned.
func start(t *testing.T, args ...string) (url string, stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	r, w := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		err := run(ctx, append([]string{"-listen", "127.0.0.1:0", "-model", filepath.Join(testenv.Root(), "models", "prefixgate-demo")}, args...), w)
		w.CloseWithError(io.EOF)
		ended <- err
	}()
	lines := bufio.NewScanner(r)
	addr := regexp.MustCompile(`listens.* addr=(\S+)`)
	for url == "" && lines.Scan() {
		if m := addr.FindStringSubmatch(lines.Text()); m != nil {
			url = "http://" + m[1]
		}
	}
	go io.Copy(io.Discard, r)
	stop = func() error {
		cancel()
		return <-ended
	}
	if url == "" {
		t.Fatalf("it ended before it listened: %v", stop())
	}
	return url, stop
}

func call(t *testing.T, method, url, body string) (status int, text string, err error) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer res.Body.Close()
	out, err := io.ReadAll(res.Body)
	return res.StatusCode, string(out), err
}

func TestItServesWhatTheFlagsSay(t *testing.T) {
	url, stop := start(t, "-served-model-name", "big", "-served-model-name", "also-big", "-lora", "tuned=adapters/tuned",
		"-block-size", "32", "-num-blocks", "500", "-max-model-len", "2000", "-prefill-rate", "+Inf", "-decode-rate", "+Inf", "-fail-after", "5")
	for path, want := range map[string][]string{
		"/health":    {""},
		"/v1/models": {`"id":"big"`, `"id":"also-big"`, `"id":"tuned"`, `"root":"adapters/tuned","parent":"big"`, `"max_model_len":2000`},
		"/metrics":   {`block_size="32"`, `num_gpu_blocks="500"`, `model_name="big"`},
	} {
		status, text, err := call(t, http.MethodGet, url+path, "")
		if err != nil || status != http.StatusOK {
			t.Errorf("GET %s = %d, %v", path, status, err)
		}
		for _, w := range want {
			if !strings.Contains(text, w) {
				t.Errorf("GET %s lacks %s", path, w)
			}
		}
	}
	if status, text, err := call(t, http.MethodPost, url+"/v1/completions", `{"model":"tuned","prompt":"Hello","max_tokens":20}`); err != nil || status != http.StatusOK {
		t.Errorf("completion = %d %s, %v", status, text, err)
	}
	if status, text, _ := call(t, http.MethodPost, url+"/detokenize", `{"tokens":[100,101]}`); status != http.StatusOK {
		t.Errorf("detokenize = %d %s", status, text)
	}
	if _, text, err := call(t, http.MethodPost, url+"/v1/completions", `{"prompt":"Hello","max_tokens":20,"stream":true}`); err == nil || strings.Count(text, "data: ") != 5 {
		t.Errorf("stream with -fail-after 5 = %q, %v, want a broken connection after five tokens", text, err)
	}
	if err := stop(); err != nil {
		t.Errorf("run = %v after its context ended", err)
	}
	if _, _, err := call(t, http.MethodGet, url+"/health", ""); err == nil {
		t.Error("it still answers after its end")
	}
}

func TestFlagsAreChecked(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"more", "unexpected argument"},
		{"-prefill-rate 0", "--prefill-rate"},
		{"-decode-rate -1", "--decode-rate"},
		{"-lora =path", "name=path"},
	} {
		if _, err := parse(strings.Fields(c.args), io.Discard); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("parse(%s) = %v, want it to name %s", c.args, err, c.want)
		}
	}
	for _, c := range []struct{ args, want string }{
		{"-model nowhere/at/all", "nowhere"},
		{"-block-size -3", "block_tokens"},
		{"-max-model-len 1000000", "num_blocks"},
	} {
		args := append([]string{"-model", filepath.Join(testenv.Root(), "models", "prefixgate-demo"), "-listen", "127.0.0.1:0"}, strings.Fields(c.args)...)
		if err := run(t.Context(), args, io.Discard); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("run(%s) = %v, want it to name %s", c.args, err, c.want)
		}
	}
}

func TestAStartThatIsInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	r, w := io.Pipe()
	go func() {
		bufio.NewReader(r).ReadString('\n') // The tokenizer is loaded: the delay begins.
		cancel()
		io.Copy(io.Discard, r)
	}()
	if err := run(ctx, []string{"-model", filepath.Join(testenv.Root(), "models", "prefixgate-demo"), "-startup-delay", "10h", "-listen", "127.0.0.1:0"}, w); err != nil {
		t.Errorf("run = %v, want no error for an interrupted start", err)
	}
}
