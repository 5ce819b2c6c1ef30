package tokenize

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sort"

	"prefixgate/internal/tokenize/render"
)

// Names of a model's files.
const (
	fileTokenizer   = "tokenizer.json"
	fileConfig      = "tokenizer_config.json"
	fileSpecial     = "special_tokens_map.json"
	fileTemplate    = "chat_template.jinja"
	fileTemplateOld = "chat_template.json"
	fileModel       = "config.json"
	fileTekken      = "tekken.json"
	fileMistral     = "params.json"
	dirTemplates    = "additional_chat_templates"
)

// maxFileBytes bounds every file that is read whole. The largest known tokenizer.json has 33 MB.
const maxFileBytes = 512 << 20

// source is what a model's folder holds, before anything is built from it.
type source struct {
	// dir is the folder that the files lie in.
	dir string
	// tokenizerPath is the tokenizer.json; it need not exist.
	tokenizerPath string
	// tokenizerJSON is its text; nil if there is none.
	tokenizerJSON []byte
	// config is tokenizer_config.json; zero if there is none.
	config tokenizerConfig
	// chat are the chat templates, if there are any, and the special tokens that they and the tokenizer know by name.
	chat render.Source
	// modelType and architecture are what config.json says, "" if unknown. mistral says that the files are Mistral's own.
	modelType, architecture string
	mistral                 bool
}

// tokenizerConfig is what matters of tokenizer_config.json.
type tokenizerConfig struct {
	Class              string                `json:"tokenizer_class"`
	AddBOS             *bool                 `json:"add_bos_token"`
	AddEOS             *bool                 `json:"add_eos_token"`
	AddedTokensDecoder map[string]addedToken `json:"added_tokens_decoder"`
}

// addedToken is an entry of added_tokens in tokenizer.json, and of added_tokens_decoder, whose key is the id.
type addedToken struct {
	ID         uint32 `json:"id"`
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"`
	LStrip     bool   `json:"lstrip"`
	RStrip     bool   `json:"rstrip"`
	Normalized bool   `json:"normalized"`
	Special    bool   `json:"special"`
}

// readSource reads the files of a model from a folder, or from the folder of a tokenizer.json. templateOverride is a file
// that replaces the chat template, or "".
func readSource(path, templateOverride string) (*source, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("model %s: %w", path, err)
	}
	src := &source{dir: path}
	if !info.IsDir() {
		src.dir = filepath.Dir(path)
		src.tokenizerPath = path
	} else {
		src.tokenizerPath = filepath.Join(path, fileTokenizer)
	}
	src.tokenizerJSON, err = readOptional(src.tokenizerPath)
	if err != nil {
		return nil, err
	}
	if err := src.readConfig(templateOverride); err != nil {
		return nil, err
	}
	if err := src.readModel(); err != nil {
		return nil, err
	}
	if src.tokenizerJSON == nil && !src.mistral {
		return nil, fmt.Errorf("model folder %s has no %s: name a folder that holds one, or set mode to remote or off", src.dir, fileTokenizer)
	}
	return src, nil
}

// readConfig reads tokenizer_config.json, and what chat templates need of it.
func (s *source) readConfig(templateOverride string) error {
	path := filepath.Join(s.dir, fileConfig)
	data, err := readOptional(path)
	if err != nil {
		return err
	}
	if data != nil {
		if err := json.Unmarshal(data, &s.config); err != nil {
			return fmt.Errorf("%s is not a tokenizer configuration: %w", path, err)
		}
	}
	s.chat, err = render.LoadSource(s.dir)
	if err != nil && !errors.Is(err, render.ErrNoTemplate) {
		return err
	}
	if templateOverride != "" {
		s.chat.Templates, err = render.ReadTemplate(templateOverride)
		if err != nil {
			return fmt.Errorf("chat_template: %w", err)
		}
	}
	return nil
}

// readModel reads what config.json says about the kind of model.
func (s *source) readModel() error {
	path := filepath.Join(s.dir, fileModel)
	data, err := readOptional(path)
	if err != nil {
		return err
	}
	if data != nil {
		var model struct {
			Type          string   `json:"model_type"`
			Architectures []string `json:"architectures"`
		}
		if err := json.Unmarshal(data, &model); err != nil {
			return fmt.Errorf("%s is not a model configuration: %w", path, err)
		}
		s.modelType = model.Type
		if len(model.Architectures) > 0 {
			s.architecture = model.Architectures[0]
		}
	}
	// The engine prefers Mistral's own tokenizer where its file is there.
	if _, err := os.Stat(filepath.Join(s.dir, fileTekken)); err == nil {
		s.mistral = true
	} else if _, err := os.Stat(filepath.Join(s.dir, fileMistral)); err == nil && s.tokenizerJSON == nil {
		s.mistral = true
	}
	return nil
}

// extraTokens returns what tokenizer_config.json declares beyond tokenizer.json's own tokens, ordered by id: transformers adds
// those when it loads the model.
func (s *source) extraTokens(known []addedToken) ([]addedToken, error) {
	have := make(map[string]bool, len(known))
	for _, t := range known {
		have[t.Content] = true
	}
	extra := []addedToken{}
	for id, t := range s.config.AddedTokensDecoder {
		if have[t.Content] {
			continue
		}
		if _, err := fmt.Sscanf(id, "%d", &t.ID); err != nil {
			return nil, fmt.Errorf("%s: added_tokens_decoder has the key %q, which is no token id", filepath.Join(s.dir, fileConfig), id)
		}
		extra = append(extra, t)
	}
	sort.Slice(extra, func(i, j int) bool { return extra[i].ID < extra[j].ID })
	return extra, nil
}

// readOptional returns a file's bytes, or nil if there is no such file.
func readOptional(path string) ([]byte, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read model file: %w", err)
	}
	defer func() { _ = f.Close() }()
	data, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err != nil {
		return nil, fmt.Errorf("read model file %s: %w", path, err)
	}
	if len(data) > maxFileBytes {
		return nil, fmt.Errorf("%s is larger than %d bytes: this is no file of a tokenizer", path, maxFileBytes)
	}
	return data, nil
}
