package tokenize

import (
	"bytes"
	"context"
	"crypto/sha1" //nolint:gosec // git's own names for files
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"prefixgate/internal/openai"
)

const (
	testCommit = "0123456789abcdef0123456789abcdef01234567"
	testSecret = "hf_secret_of_the_test"
)

// fakeHub serves one model as the hub does: an API that lists files, small files by itself, large ones by a redirect to a
// store on another host.
type fakeHub struct {
	*httptest.Server
	store *httptest.Server
	files map[string][]byte
	token string // required if set

	mu       sync.Mutex
	requests []string
	fail     int    // how many requests to answer with 503 first
	corrupt  string // a file whose contents are damaged
	leaked   bool   // the store saw the token
}

func newFakeHub(t *testing.T) *fakeHub {
	t.Helper()
	h := &fakeHub{files: map[string][]byte{"README.md": []byte("not for us"), "model.safetensors": []byte("weights")}}
	for _, name := range []string{fileTokenizer, fileConfig, fileTemplate} {
		data, err := os.ReadFile(filepath.Join(demoModel(), name))
		if err != nil {
			t.Fatal(err)
		}
		h.files[name] = data
	}
	h.files["additional_chat_templates/tool_use.jinja"] = []byte("{{ 'tools' }}")
	h.store = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.mu.Lock()
		h.leaked = h.leaked || r.Header.Get("Authorization") != ""
		h.mu.Unlock()
		w.Header().Set("Etag", `"another-one"`)
		_, _ = w.Write(h.contents(strings.TrimPrefix(r.URL.Path, "/")))
	}))
	t.Cleanup(h.store.Close)
	h.Server = httptest.NewServer(http.HandlerFunc(h.serve))
	t.Cleanup(h.Close)
	t.Setenv("HF_ENDPOINT", h.URL)
	t.Setenv("HF_HOME", t.TempDir())
	for _, name := range []string{"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"} {
		t.Setenv(name, "")
	}
	return h
}

func (h *fakeHub) contents(name string) []byte {
	data := h.files[name]
	if name == h.corrupt {
		return append([]byte("x"), data[1:]...)
	}
	return data
}

func (h *fakeHub) serve(w http.ResponseWriter, r *http.Request) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.requests = append(h.requests, r.URL.Path)
	if h.fail > 0 {
		h.fail--
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	if h.token != "" && r.Header.Get("Authorization") != "Bearer "+h.token {
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	if r.URL.Path == "/api/models/org/model/revision/main" || r.URL.Path == "/api/models/org/model/revision/"+testCommit {
		var info hubInfo
		info.SHA = testCommit
		for name := range h.files {
			info.Siblings = append(info.Siblings, hubFile{name})
		}
		_ = json.NewEncoder(w).Encode(info)
		return
	}
	name, ok := strings.CutPrefix(r.URL.Path, "/org/model/resolve/"+testCommit+"/")
	data := h.files[name]
	if !ok || data == nil {
		w.WriteHeader(http.StatusNotFound)
		return
	}
	if name == fileTokenizer { // large: by its SHA-256, from the store
		sum := sha256.Sum256(data)
		w.Header().Set("X-Linked-Etag", `"`+hex.EncodeToString(sum[:])+`"`)
		http.Redirect(w, r, h.store.URL+"/"+name+"?signature=private", http.StatusFound)
		return
	}
	git := sha1.New() //nolint:gosec // git's own names for files
	fmt.Fprintf(git, "blob %d\x00", len(data))
	git.Write(data)
	w.Header().Set("Etag", `"`+hex.EncodeToString(git.Sum(nil))+`"`)
	_, _ = w.Write(h.contents(name))
}

// asked returns how many requests the hub has seen since the last call.
func (h *fakeHub) asked() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := len(h.requests)
	h.requests = nil
	return n
}

func TestHub(t *testing.T) {
	h := newFakeHub(t)
	var logged bytes.Buffer
	log := slog.New(slog.NewTextHandler(&logged, &slog.HandlerOptions{Level: slog.LevelDebug}))
	opts := Options{Model: "org/model"}
	find := func() (string, error) { return findModel(t.Context(), opts.withDefaults(), log) }

	t.Setenv("HF_HUB_OFFLINE", "1")
	if _, err := find(); err == nil || !strings.Contains(err.Error(), "HF_HUB_OFFLINE") {
		t.Errorf("an empty cache offline = %v, want an error that names HF_HUB_OFFLINE", err)
	}
	t.Setenv("HF_HUB_OFFLINE", "")

	h.token = testSecret
	if _, err := find(); err == nil || !strings.Contains(err.Error(), "HF_TOKEN") {
		t.Errorf("a private model without token = %v, want an error that names HF_TOKEN", err)
	}
	t.Setenv("HF_TOKEN", testSecret)
	h.fail = 1 // passes
	dir, err := find()
	if err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(os.Getenv("HF_HOME"), "hub", "models--org--model")
	if want := filepath.Join(root, "snapshots", testCommit); dir != want {
		t.Errorf("snapshot = %s, want %s", dir, want)
	}
	if ref, err := os.ReadFile(filepath.Join(root, "refs", "main")); err != nil || string(ref) != testCommit {
		t.Errorf("refs/main = %q, %v, want the commit", ref, err)
	}
	for _, name := range []string{fileTokenizer, fileConfig, fileTemplate, "additional_chat_templates/tool_use.jinja"} {
		path := filepath.Join(dir, name)
		got, err := os.ReadFile(path)
		if err != nil || !bytes.Equal(got, h.files[name]) {
			t.Errorf("%s: %d bytes, %v, want %d", name, len(got), err, len(h.files[name]))
		}
		link, err := os.Readlink(path)
		if err != nil || !strings.Contains(link, "blobs") || filepath.IsAbs(link) {
			t.Errorf("%s is %q, %v, want a relative link into blobs", name, link, err)
		}
	}
	for _, name := range []string{"README.md", "model.safetensors"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err == nil {
			t.Errorf("%s was fetched, which nobody needs", name)
		}
	}
	if h.leaked {
		t.Error("the token went to the store that the hub redirects to")
	}

	h.mu.Lock()
	if last := h.requests[len(h.requests)-1]; !strings.HasSuffix(last, "/"+fileTokenizer) {
		t.Errorf("the last request was for %s, want the tokenizer: it makes the snapshot count", last)
	}
	h.mu.Unlock()

	// A second time asks only what the branch stands for; a commit asks nothing; offline works.
	h.asked()
	if again, err := find(); err != nil || again != dir || h.asked() != 1 {
		t.Errorf("a second time = %s, %v, want %s after one request", again, err, dir)
	}
	opts.Revision = testCommit
	if again, err := find(); err != nil || again != dir || h.asked() != 0 {
		t.Errorf("by commit = %s, %v, want %s without a request", again, err, dir)
	}
	opts.Revision = ""
	t.Setenv("HF_HUB_OFFLINE", "1")
	if again, err := find(); err != nil || again != dir || h.asked() != 0 {
		t.Errorf("offline = %s, %v, want %s without a request", again, err, dir)
	}
	t.Setenv("HF_HUB_OFFLINE", "")

	m := load(t, opts)
	if _, err := m.Encode(t.Context(), parse(t, openai.Chat, `{"messages":[{"role":"user","content":"Hi"}]}`)); err != nil {
		t.Errorf("a chat with a model from the hub: %v", err)
	}

	// The hub gone: what is there is used, and said.
	h.Close()
	if again, err := find(); err != nil || again != dir || !strings.Contains(logged.String(), "cached one is used") {
		t.Errorf("the hub gone = %s, %v, want %s and a line in the log", again, err, dir)
	}
	if strings.Contains(logged.String(), testSecret) || strings.Contains(logged.String(), "signature") {
		t.Error("the log holds a secret")
	}
}

func TestHubRefusesDamagedFiles(t *testing.T) {
	for _, name := range []string{fileTokenizer, fileConfig} {
		h := newFakeHub(t)
		h.corrupt = name
		_, err := findModel(t.Context(), Options{Model: "org/model"}.withDefaults(), slog.New(slog.DiscardHandler))
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("a damaged %s = %v, want an error that names it", name, err)
		}
		if _, err := os.Stat(filepath.Join(os.Getenv("HF_HOME"), "hub", "models--org--model", "refs", "main")); err == nil {
			t.Errorf("a damaged %s left a snapshot behind that looks complete", name)
		}
	}
}

func TestHubErrorsSayWhatToDo(t *testing.T) {
	h := newFakeHub(t)
	find := func(model, revision string) error {
		_, err := findModel(t.Context(), Options{Model: model, Revision: revision}.withDefaults(), slog.New(slog.DiscardHandler))
		return err
	}
	for _, c := range []struct{ model, revision, want string }{
		{"org/other", "", "404"},
		{"org/model", "nosuch", "404"},
		{"../secrets", "", "no such folder"},
		{"org/../model", "", "no such folder"},
		{"/does/not/exist", "", "no such folder"},
		{"tokenizer.json", "", "no such folder"},
		{"org/model", "../../x", "revision"},
	} {
		if err := find(c.model, c.revision); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("model %q revision %q = %v, want an error with %q", c.model, c.revision, err, c.want)
		}
	}
	delete(h.files, fileTokenizer)
	if err := find("org/model", ""); err == nil || !strings.Contains(err.Error(), fileTokenizer) {
		t.Errorf("a model without tokenizer = %v, want an error that names the file", err)
	}
	t.Setenv("HF_ENDPOINT", "not a url")
	if err := find("org/model", ""); err == nil || !strings.Contains(err.Error(), "HF_ENDPOINT") {
		t.Errorf("a bad endpoint = %v, want an error that names HF_ENDPOINT", err)
	}
}

// Several gateways that start at once share one cache.
func TestHubFetchedAtOnce(t *testing.T) {
	newFakeHub(t)
	var wg sync.WaitGroup
	dirs := make([]string, 8)
	for i := range dirs {
		wg.Go(func() {
			dir, err := findModel(context.Background(), Options{Model: "org/model"}.withDefaults(), slog.New(slog.DiscardHandler))
			if err != nil {
				t.Error(err)
			}
			dirs[i] = dir
		})
	}
	wg.Wait()
	if len(slices.Compact(dirs)) != 1 {
		t.Errorf("snapshots = %v, want one", dirs)
	}
	left, err := filepath.Glob(filepath.Join(os.Getenv("HF_HOME"), "hub", "models--org--model", "blobs", "*incomplete"))
	if err != nil || len(left) > 0 {
		t.Errorf("left over: %v, %v", left, err)
	}
}
