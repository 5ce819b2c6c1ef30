package tokenize

import (
	"context"
	"crypto/rand"
	"crypto/sha1" //nolint:gosec // git's own names for files
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// A model named as on the hub is fetched into the hub's own cache, laid out as its Python client does it, so that a model that
// vLLM or transformers fetched on this machine is found and the other way round:
//
//	<cache>/models--<org>--<name>/refs/<revision>           the commit that a branch or tag stands for
//	<cache>/models--<org>--<name>/snapshots/<commit>/<file> links to
//	<cache>/models--<org>--<name>/blobs/<etag>              the contents
//
// Only the tokenizer's files and the chat templates are fetched. The settings are the client's: HF_ENDPOINT, HF_TOKEN (or the
// file in HF_TOKEN_PATH, or HF_HOME's token), HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE.

// hubFiles are the files of a model that are fetched if it has them.
var hubFiles = [...]string{fileTokenizer, fileConfig, fileSpecial, fileTemplate, fileTemplateOld, fileModel, fileTekken, fileMistral}

// hubName matches the names of models on the hub.
var hubName = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)?$`)

// hubRevision matches branches, tags and commits; slashes are allowed as in refs/pr/1.
var hubRevision = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._/-]*$`)

var commitName = regexp.MustCompile(`^[0-9a-f]{40}$`)

// findModel returns the folder, or the tokenizer.json, of the model that the options name, fetching it if need be.
func findModel(ctx context.Context, opts Options, log *slog.Logger) (string, error) {
	_, err := os.Stat(opts.Model)
	if err == nil {
		return opts.Model, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("model: %w", err)
	}
	if !hubName.MatchString(opts.Model) || strings.Contains(opts.Model, "..") || strings.HasSuffix(opts.Model, ".json") {
		return "", fmt.Errorf("model %q: there is no such folder or file, and it is no name of a model on the hub", opts.Model)
	}
	if !hubRevision.MatchString(opts.Revision) || strings.Contains(opts.Revision, "..") {
		return "", fmt.Errorf("revision %q is no branch, tag or commit", opts.Revision)
	}
	h, err := newHub(opts.Model, opts.Revision)
	if err != nil {
		return "", err
	}
	cached := h.cached()
	if cached != "" && commitName.MatchString(opts.Revision) {
		return cached, nil
	}
	if h.offline {
		if cached == "" {
			return "", fmt.Errorf("model %s is not in the hub's cache %s and HF_HUB_OFFLINE is set: fetch it first, or name a folder", opts.Model, h.cache)
		}
		return cached, nil
	}
	ctx, cancel := context.WithTimeout(ctx, opts.HubTimeout)
	defer cancel()
	fetched, err := h.fetch(ctx)
	if err != nil && cached != "" {
		log.Warn("the hub cannot be asked for a newer tokenizer; the cached one is used", "err", err)
		return cached, nil
	}
	return fetched, err
}

// hub is one model on the hub and its place in the cache.
type hub struct {
	model, revision string
	endpoint        *url.URL
	token           string // a secret: for the hub's own host only
	cache, dir      string
	offline         bool
	client          *http.Client
}

func newHub(model, revision string) (*hub, error) {
	h := &hub{model: model, revision: revision}
	home := os.Getenv("HF_HOME")
	if home == "" {
		base := os.Getenv("XDG_CACHE_HOME")
		if base == "" {
			user, err := os.UserHomeDir()
			if err != nil {
				return nil, fmt.Errorf("find the hub's cache: %w: set HF_HOME", err)
			}
			base = filepath.Join(user, ".cache")
		}
		home = filepath.Join(base, "huggingface")
	}
	h.cache = firstNonEmpty(os.Getenv("HF_HUB_CACHE"), os.Getenv("HUGGINGFACE_HUB_CACHE"), filepath.Join(home, "hub"))
	h.dir = filepath.Join(h.cache, "models--"+strings.ReplaceAll(model, "/", "--"))
	h.offline = envTrue("HF_HUB_OFFLINE") || envTrue("TRANSFORMERS_OFFLINE")
	endpoint := strings.TrimSuffix(firstNonEmpty(os.Getenv("HF_ENDPOINT"), "https://huggingface.co"), "/")
	parsed, err := url.Parse(endpoint)
	if err != nil || parsed.Host == "" || parsed.Scheme != "http" && parsed.Scheme != "https" {
		return nil, errors.New("HF_ENDPOINT is not the URL of a hub, such as https://huggingface.co")
	}
	h.endpoint = parsed
	h.token = firstNonEmpty(os.Getenv("HF_TOKEN"), os.Getenv("HUGGING_FACE_HUB_TOKEN"))
	if h.token == "" && !envTrue("HF_HUB_DISABLE_IMPLICIT_TOKEN") {
		// No file, or one that cannot be read, means no token: most models need none.
		data, err := os.ReadFile(firstNonEmpty(os.Getenv("HF_TOKEN_PATH"), filepath.Join(home, "token")))
		if err == nil {
			h.token = string(data)
		}
	}
	h.token = strings.TrimSpace(h.token)
	h.client = &http.Client{Transport: http.DefaultTransport}
	return h, nil
}

func firstNonEmpty(values ...string) string {
	for _, v := range values {
		if v != "" {
			return v
		}
	}
	return ""
}

func envTrue(name string) bool {
	switch strings.ToUpper(os.Getenv(name)) {
	case "1", "ON", "YES", "TRUE":
		return true
	}
	return false
}

// cached returns the snapshot of the revision in the cache, if it has a tokenizer, or "".
func (h *hub) cached() string {
	commit := h.revision
	if !commitName.MatchString(commit) {
		data, err := os.ReadFile(filepath.Join(h.dir, "refs", filepath.FromSlash(h.revision)))
		if err != nil {
			return ""
		}
		commit = strings.TrimSpace(string(data))
		if !commitName.MatchString(commit) {
			return ""
		}
	}
	dir := filepath.Join(h.dir, "snapshots", commit)
	for _, name := range [...]string{fileTokenizer, fileTekken} {
		if _, err := os.Stat(filepath.Join(dir, name)); err == nil {
			return dir
		}
	}
	return ""
}

// fetch brings the files of the revision into the cache and returns the snapshot's folder.
func (h *hub) fetch(ctx context.Context) (string, error) {
	info, err := h.info(ctx)
	if err != nil {
		return "", err
	}
	dir := filepath.Join(h.dir, "snapshots", info.SHA)
	found := false
	// The tokenizer goes last: a snapshot that has one counts as complete, even if this process ends half-way.
	slices.SortStableFunc(info.Siblings, func(a, b hubFile) int { return a.order() - b.order() })
	for _, file := range info.Siblings {
		if !wanted(file.Name) {
			continue
		}
		found = found || file.Name == fileTokenizer || file.Name == fileTekken
		if _, err := os.Stat(filepath.Join(dir, filepath.FromSlash(file.Name))); err == nil {
			continue
		}
		if err := h.download(ctx, info.SHA, file.Name, dir); err != nil {
			return "", err
		}
	}
	if !found {
		return "", fmt.Errorf("model %s has no %s on the hub: set mode to remote or off for it", h.model, fileTokenizer)
	}
	// The reference goes last: it makes the snapshot visible to others.
	if !commitName.MatchString(h.revision) {
		ref := filepath.Join(h.dir, "refs", filepath.FromSlash(h.revision))
		if err := writeFile(ref, strings.NewReader(info.SHA)); err != nil {
			return "", err
		}
	}
	return dir, nil
}

// wanted says whether a file of a model matters here.
func wanted(name string) bool {
	if slices.Contains(hubFiles[:], name) {
		return true
	}
	dir, base := path.Split(name)
	return dir == dirTemplates+"/" && strings.HasSuffix(base, ".jinja") && base == path.Base(path.Clean(base))
}

// hubInfo is what the hub says about a revision.
type hubInfo struct {
	SHA      string    `json:"sha"`
	Siblings []hubFile `json:"siblings"`
}

// hubFile is a file of a revision.
type hubFile struct {
	Name string `json:"rfilename"`
}

// order is 1 for the files by which a snapshot is known to be complete, 0 for all others.
func (f hubFile) order() int {
	if f.Name == fileTokenizer || f.Name == fileTekken {
		return 1
	}
	return 0
}

// info asks the hub for the commit and the files of the revision.
func (h *hub) info(ctx context.Context) (*hubInfo, error) {
	resp, _, err := h.get(ctx, "api", "models", h.model, "revision", url.PathEscape(h.revision))
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	const maxInfo = 32 << 20
	info := new(hubInfo)
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxInfo)).Decode(info); err != nil {
		return nil, fmt.Errorf("the hub's answer about model %s: %w", h.model, err)
	}
	if !commitName.MatchString(info.SHA) {
		return nil, fmt.Errorf("the hub's answer about model %s names no commit", h.model)
	}
	return info, nil
}

// download brings one file into the cache and links it into the snapshot.
func (h *hub) download(ctx context.Context, commit, name, snapshot string) error {
	resp, etag, err := h.get(ctx, h.model, "resolve", commit, name)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.ContentLength > maxFileBytes {
		return fmt.Errorf("model %s: %s has %d bytes: this is no file of a tokenizer", h.model, name, resp.ContentLength)
	}
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxFileBytes+1))
	if err != nil {
		return fmt.Errorf("download %s of model %s: %w", name, h.model, err)
	}
	if len(data) > maxFileBytes {
		return fmt.Errorf("model %s: %s is larger than %d bytes: this is no file of a tokenizer", h.model, name, maxFileBytes)
	}
	blob, err := blobName(etag, data)
	if err != nil {
		return fmt.Errorf("download %s of model %s: %w", name, h.model, err)
	}
	if err := writeFile(filepath.Join(h.dir, "blobs", blob), strings.NewReader(string(data))); err != nil {
		return err
	}
	link := filepath.Join(snapshot, filepath.FromSlash(name))
	if err := os.MkdirAll(filepath.Dir(link), 0o755); err != nil {
		return fmt.Errorf("write into the hub's cache: %w: set HF_HUB_CACHE to a folder that can be written", err)
	}
	up := strings.Repeat("../", strings.Count(name, "/")+2)
	if err := os.Symlink(filepath.FromSlash(up+"blobs/"+blob), link); err == nil || errors.Is(err, fs.ErrExist) {
		return nil
	}
	return writeFile(link, strings.NewReader(string(data))) // a file system without links
}

// errContents says that a download is not what the hub announced.
var errContents = errors.New("its contents are not what the hub announced: try again")

// blobName returns the name of a file in blobs: its entity tag, which for files of git is their SHA-1 in git's way, for large
// ones their SHA-256. Both are checked against the contents.
func blobName(etag string, data []byte) (string, error) {
	etag = strings.Trim(strings.TrimPrefix(etag, "W/"), `"`)
	sum := sha256.Sum256(data)
	byContent := hex.EncodeToString(sum[:])
	switch {
	case commitName.MatchString(etag):
		git := sha1.New() //nolint:gosec // git's own names for files
		fmt.Fprintf(git, "blob %d\x00", len(data))
		_, _ = git.Write(data) // never fails
		if hex.EncodeToString(git.Sum(nil)) != etag {
			return "", errContents
		}
		return etag, nil
	case len(etag) == len(byContent) && isHex(etag):
		if etag != byContent {
			return "", errContents
		}
	}
	return byContent, nil
}

func isHex(s string) bool {
	_, err := hex.DecodeString(s)
	return err == nil
}

// hubTries is how often a request is tried that fails for a reason that may pass.
const hubTries = 4

// get asks the hub for a path and returns a 200 and the file's entity tag.
func (h *hub) get(ctx context.Context, parts ...string) (*http.Response, string, error) {
	target := h.endpoint.JoinPath(parts...)
	wait := 500 * time.Millisecond
	for try := 1; ; try++ {
		resp, etag, err := h.getOnce(ctx, target)
		if err == nil && resp.StatusCode == http.StatusOK {
			return resp, etag, nil
		}
		passing := err != nil
		if err == nil {
			_ = resp.Body.Close()
			passing = resp.StatusCode >= 500 || resp.StatusCode == http.StatusTooManyRequests
			err = h.refusal(resp.StatusCode)
		} else {
			err = fmt.Errorf("ask the hub at %s for model %s: %w: check the network and HF_ENDPOINT, or name a folder that holds the model's files",
				h.endpoint.Host, h.model, err)
		}
		if !passing || try == hubTries || ctx.Err() != nil {
			return nil, "", err
		}
		select {
		case <-time.After(wait):
			wait *= 2
		case <-ctx.Done():
			return nil, "", err
		}
	}
}

// refusal says what a status other than 200 means.
func (h *hub) refusal(status int) error {
	switch status {
	case http.StatusUnauthorized, http.StatusForbidden:
		return fmt.Errorf("the hub at %s does not give model %s to this token (status %d): set HF_TOKEN to one that may read it, and accept the model's license there", h.endpoint.Host, h.model, status)
	case http.StatusNotFound:
		return fmt.Errorf("the hub at %s has no model %s with revision %s (status 404): check model and revision, or name a folder", h.endpoint.Host, h.model, h.revision)
	}
	return fmt.Errorf("the hub at %s answers %d for model %s", h.endpoint.Host, status, h.model)
}

// getOnce sends one request. The entity tag of the file is that of the hub's own answer, not of the store it redirects to.
func (h *hub) getOnce(ctx context.Context, target *url.URL) (*http.Response, string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, target.String(), http.NoBody)
	if err != nil {
		return nil, "", err
	}
	req.Header.Set("User-Agent", "prefixgate")
	req.Header.Set("Accept-Encoding", "identity") // the tag is of the plain contents
	if h.token != "" {
		req.Header.Set("Authorization", "Bearer "+h.token)
	}
	var linked string
	client := *h.client
	client.CheckRedirect = func(next *http.Request, via []*http.Request) error {
		if len(via) >= 10 {
			return errors.New("too many redirects")
		}
		if next.URL.Host != h.endpoint.Host {
			next.Header.Del("Authorization")
		}
		if linked == "" && next.Response != nil {
			linked = firstNonEmpty(next.Response.Header.Get("X-Linked-Etag"), next.Response.Header.Get("Etag"))
		}
		return nil
	}
	resp, err := client.Do(req)
	if err != nil {
		// The error's text holds the URL, which is where a store's signature would be.
		if urlErr, ok := errors.AsType[*url.Error](err); ok {
			err = urlErr.Err
		}
		return nil, "", err
	}
	return resp, firstNonEmpty(linked, resp.Header.Get("X-Linked-Etag"), resp.Header.Get("Etag")), nil
}

// writeFile writes a file in one step: no one ever sees a part of it.
func writeFile(name string, data io.Reader) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("write into the hub's cache: %w: set HF_HUB_CACHE to a folder that can be written", err)
		}
	}()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	temporary := name + "." + rand.Text() + ".incomplete"
	f, err := os.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, data)
	if err == nil {
		err = f.Sync()
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(temporary, name)
	}
	if err != nil {
		_ = os.Remove(temporary) // best effort: the error above counts
	}
	return err
}
